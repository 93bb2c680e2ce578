"""Uploaded voices, encoded, on disk.

A voice is a directory with its encoded latents and a JSON file of metadata. One rename puts it in place, so it is
there completely or not at all, and a restart does not encode it again. Several servers may share the directory: each
sees what the others add and delete. File and directory names are generated here; no client input becomes part of a
path.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import shutil
import threading
import time
import unicodedata
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from service.system.access import no_space

log = logging.getLogger(__name__)

LONGEST_NAME = 64
"""Characters of a voice's name, before it is normalised; ids are shorter."""
NAME = re.compile(r"\w(?:[\w .'-]{0,62}[\w.'])?")
INVISIBLE = re.compile("[\u034f\u17b4\u17b5\u180b-\u180f\ufe00-\ufe0f\U000e0100-\U000e01ef]")
"""Marks that nobody sees: with them, two names would look the same."""


def is_name(name: str) -> bool:
    """Whether a voice may have this name, which is in the composed form (NFC). The vowel signs and tones of letters
    outside ASCII, as Hindi and Thai have them, belong to their letters."""
    letters = "".join("x" if _is_sign(mark) and not before.isascii() else mark for before, mark in pairwise(f" {name}"))
    return NAME.fullmatch(letters) is not None


def _is_sign(character: str) -> bool:
    return unicodedata.category(character) in ("Mn", "Mc") and not INVISIBLE.match(character)


def name_key(name: str) -> str:
    """Equal for names that differ only in case or in compatible characters (ligatures, full-width letters, long s)."""
    return unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", name).casefold())


CACHED_REFERENCES = 64
"""Encoded reference audio of up to a minute: a third of a megabyte each."""


class ReferenceCache:
    """Patches of the reference audio that was encoded last, by a digest of samples and model (LRU)."""

    def __init__(self) -> None:
        self._patches: OrderedDict[bytes, np.ndarray] = OrderedDict()

    def get(self, key: bytes) -> np.ndarray | None:
        if key in self._patches:
            self._patches.move_to_end(key)
        return self._patches.get(key)

    def put(self, key: bytes, patches: np.ndarray) -> None:
        self._patches[key] = patches
        if len(self._patches) > CACHED_REFERENCES:
            self._patches.popitem(last=False)


METADATA = "voice.json"
LATENTS = "latents.safetensors"
UNFINISHED = ".unfinished-"
ABANDONED_SECONDS = 3600.0
"""An unfinished upload older than this was abandoned and may be deleted."""
CLOCK_TICK = 2_000_000_000
"""Nanoseconds. Two changes of a directory within this time may have the same modification time."""
CACHED_LATENTS = 32
LARGEST_LATENT = 1000.0
TENSORS = frozenset({"reference", "prompt"})
ID = re.compile(r"voice_[0-9a-f]{24}")


class Voice(msgspec.Struct, frozen=True):
    """encoder: the checkpoint that made the latents; no other checkpoint can use them. created_at: Unix time.
    ref_text: transcript of the reference audio. seconds: its length. consent: None for a voice made from a description.
    owner: digest of the API key that it belongs to; "": everyone's.
    """

    id: str
    name: str
    encoder: str
    consent: str | None
    created_at: int
    seconds: float
    ref_text: str | None = None
    description: str | None = None
    owner: str = ""

    def belongs_to(self, owner: str) -> bool:
        """Whether requests of `owner` ("": any) may see it."""
        return not owner or self.owner in ("", owner)


class VoiceStoreError(Exception):
    """A voice cannot be stored, read or deleted. reason: "full" (max_voices reached), "exists", "gone" (deleted in the
    meantime), "damaged" (its file holds no latents that can be spoken with), "disk_full" or "disk"."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class VoiceStore:
    """Thread-safe. The directory is created with the first voice."""

    def __init__(self, directory: Path, max_voices: int) -> None:
        self._directory = directory
        self._max_voices = max_voices
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, dict[str, np.ndarray]] = OrderedDict()
        self._voices: dict[str, Voice] = {}
        self._changed = -1
        """Modification time of the directory when it was last read (ns)."""
        self._unreadable = False
        """Whether the directory could not be read when it was last looked at."""
        self._skipped: dict[str, bool] = {}
        """What could not be read as a voice, and whether it is tried again."""
        self._remove_abandoned()
        self._read_changes()

    def _remove_abandoned(self) -> None:
        """Deletes what interrupted uploads left behind; recent ones may still be written by another server."""
        limit = time.time() - ABANDONED_SECONDS
        for path in self._directory.glob(f"{UNFINISHED}*"):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < limit:
                    shutil.rmtree(path, ignore_errors=True)

    def _refresh(self) -> None:
        """As _read_changes, but while the directory cannot be read, as one on a network that is away, the voices that
        are known stay."""
        try:
            self._read_changes()
        except OSError as error:
            if not self._unreadable:
                log.error("the directory of voices cannot be read: %s", error)
            self._unreadable = True
        else:
            self._unreadable = False

    def _read_changes(self) -> None:
        """Reads what has changed on disk since the last call; voices that cannot be read are skipped."""
        try:
            changed = self._directory.stat().st_mtime_ns
            if changed == self._changed and time.time_ns() - changed > CLOCK_TICK:
                return
            names = [path.name for path in self._directory.iterdir() if not path.name.startswith(".")]
        except FileNotFoundError:
            changed, names = -1, []
        self._voices = {name: self._voices[name] for name in names if name in self._voices}
        for id_ in self._cache.keys() - self._voices.keys():
            del self._cache[id_]
        for name in sorted(set(names) - self._voices.keys()):
            voice = self._read(self._directory / name)
            if voice is not None:
                self._voices[name] = voice
        left = set(names) - self._voices.keys()
        self._skipped = {name: again for name, again in self._skipped.items() if name in left}
        self._changed = -1 if any(self._skipped.values()) else changed

    def _read(self, path: Path) -> Voice | None:
        try:
            voice = msgspec.json.decode((path / METADATA).read_bytes(), type=Voice)
            return voice if voice.id == path.name and (path / LATENTS).is_file() else None
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
            if path.name not in self._skipped:
                log.warning("voice %s cannot be read and is skipped: %s", path.name, error)
            # As of a network that is away. A file system may have directories of its own, which are no voices.
            passing = isinstance(error, OSError) and not isinstance(error, FileNotFoundError | NotADirectoryError)
            self._skipped[path.name] = passing and ID.fullmatch(path.name) is not None
        return None

    def voices(self, owner: str = "") -> list[Voice]:
        with self._lock:
            self._refresh()
            found = [voice for voice in self._voices.values() if voice.belongs_to(owner)]
            return sorted(found, key=lambda voice: (voice.created_at, voice.id))

    def find(self, key: str, owner: str = "") -> Voice | None:
        """The voice of this id or name, among those that `owner` may see; None if there is none."""
        if len(key) > LONGEST_NAME:
            return None  # folding megabytes would hold the event loop for seconds
        with self._lock:
            self._refresh()
            voice = self._voices.get(key)
            return voice if voice is not None and voice.belongs_to(owner) else self._by_name(key, owner)

    def _by_name(self, name: str, owner: str) -> Voice | None:
        key, voices = name_key(name), self._voices.values()
        return next((voice for voice in voices if name_key(voice.name) == key and voice.belongs_to(owner)), None)

    def check_room(self, name: str, owner: str = "") -> None:
        """VoiceStoreError when a voice of that name cannot be added: check before its audio is encoded."""
        with self._lock:
            self._check_room(name, owner)

    def _check_room(self, name: str, owner: str) -> None:
        self._refresh()
        if self._by_name(name, owner) is not None:
            raise VoiceStoreError("exists", "a voice of that name exists already; delete it first")
        if len(self._voices) >= self._max_voices:
            raise VoiceStoreError(
                "full",
                f"too many voices: {len(self._voices)} stored, at most {self._max_voices} allowed; delete one first",
            )

    def add(
        self,
        *,
        name: str,
        encoder: str,
        consent: str | None,
        seconds: float,
        latents: Mapping[str, np.ndarray],
        ref_text: str | None = None,
        description: str | None = None,
        owner: str = "",
    ) -> Voice:
        """Stores a voice. latents: "reference" and, with ref_text, "prompt": float32 [patches, frames, channels].

        Raises VoiceStoreError and then leaves nothing on disk.
        """
        id_ = f"voice_{secrets.token_hex(12)}"
        voice = Voice(id_, name, encoder, consent, int(time.time()), round(seconds, 3), ref_text, description, owner)
        unfinished, final = self._directory / f"{UNFINISHED}{id_}", self._directory / id_
        try:
            # Written without the lock: the event loop takes it for look-ups, and disks can be slow.
            unfinished.mkdir(parents=True)
            _write(unfinished / LATENTS, save(dict(latents)))
            _write(unfinished / METADATA, msgspec.json.encode(voice))
            with _among_processes(self._directory), self._lock:
                self._check_room(name, owner)
                unfinished.rename(final)
                self._voices[id_] = voice
            _sync_directory(self._directory)
        except OSError as error:
            with self._lock:
                self._voices.pop(id_, None)
            shutil.rmtree(final, ignore_errors=True)
            log.error("voice %s cannot be stored: %s", id_, error)
            if no_space(error):
                raise VoiceStoreError("disk_full", "the disk that stores voices is full") from error
            raise VoiceStoreError("disk", "the voice cannot be written to disk") from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        return voice

    def delete(self, id_: str) -> None:
        """VoiceStoreError when there is no such voice, or it cannot be deleted and stays."""
        doomed = self._directory / f"{UNFINISHED}{id_}"
        with self._lock:
            self._refresh()
            try:
                if id_ not in self._voices:
                    raise FileNotFoundError
                # The rename hides it at once; if the server dies here, a later start deletes the rest.
                (self._directory / id_).rename(doomed)
            except FileNotFoundError as error:
                self._forget(id_)
                raise VoiceStoreError("gone", "the voice was deleted") from error
            except OSError as error:
                log.error("voice %s cannot be deleted: %s", id_, error)
                raise VoiceStoreError("disk", "the voice cannot be deleted from disk") from error
            self._forget(id_)
        shutil.rmtree(doomed, ignore_errors=True)

    def _forget(self, id_: str) -> None:
        self._voices.pop(id_, None)
        self._cache.pop(id_, None)

    def cached(self, voice: Voice) -> dict[str, np.ndarray] | None:
        """`latents`, if they are in memory."""
        with self._lock:
            cached = self._cache.get(voice.id)
            if cached is not None:
                self._cache.move_to_end(voice.id)
            return cached

    def latents(self, voice: Voice) -> dict[str, np.ndarray]:
        """Tensors "reference" and, if the voice has a transcript, "prompt". VoiceStoreError when it was deleted, or
        its file is damaged."""
        cached = self.cached(voice)
        if cached is not None:
            return cached
        try:
            tensors = load_file(self._directory / voice.id / LATENTS)
        except (OSError, SafetensorError, TypeError) as error:  # TypeError: of a dtype that NumPy has not
            if self.find(voice.id) is None:
                raise VoiceStoreError("gone", "the voice was deleted") from error
            log.error("latents of voice %s cannot be read: %s", voice.id, error)
            reason = "disk" if isinstance(error, OSError) else "damaged"
            raise VoiceStoreError(reason, "the voice's latents cannot be read") from error
        if "reference" not in tensors or not tensors.keys() <= TENSORS:
            raise VoiceStoreError("damaged", "the voice's file of latents has other tensors than expected")
        for tensor in tensors.values():
            if (problem := latents_problem(tensor)) is not None:
                raise VoiceStoreError("damaged", f"the voice's latents {problem}")
        with self._lock:
            if voice.id in self._voices:  # what was deleted while it was read is not kept
                self._cache[voice.id] = tensors
            if len(self._cache) > CACHED_LATENTS:
                self._cache.popitem(last=False)
        return tensors


def latents_problem(latents: np.ndarray) -> str | None:
    """What is wrong with latents that a file holds; None for float32 [patches, frames, channels] that can be spoken
    with; those of audio are of the order of 1."""
    if latents.dtype != np.float32:
        return f"are {latents.dtype}, not float32"
    if latents.ndim != 3 or not latents.size:
        return f"have the shape {list(latents.shape)}, not [patches, frames, channels]"
    return None if (np.abs(latents) <= LARGEST_LATENT).all() else f"hold values beyond {LARGEST_LATENT:g}, or NaN"


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def _among_processes(path: Path) -> Iterator[None]:
    """Meanwhile no other process adds a voice: between its look at the names and its rename ours could come."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
