"""Voices on disk, encoded: a safetensors file for each uploaded one, and for each built-in one in the folder .named.

A file is written beside its place and put there by one rename, so it is there completely or not at all. Several servers
may share the directory: each sees what the others add and delete. File names are generated here; no client input
becomes part of a path.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import secrets
import threading
import time
import unicodedata
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Generic, TypeVar

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


SUFFIX = ".safetensors"
UNFINISHED = ".unfinished-"
ABANDONED_SECONDS = 3600.0
"""An unfinished file older than this was abandoned and may be deleted."""
CLOCK_TICK = 2_000_000_000
"""Nanoseconds. Two changes of a directory within this time may have the same modification time."""
CACHED_VOICES, CACHED_REFERENCES = 32, 64
"""A reference of up to a minute takes a third of a megabyte."""
LARGEST_LATENT = 1000.0
LARGEST_HEADER = 1 << 20
TENSORS = frozenset({"reference", "prompt"})
ID = re.compile(r"voice_[0-9a-f]{24}")

K = TypeVar("K")
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """The `size` entries that were used last."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._entries: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K) -> V | None:
        if key in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key)

    def put(self, key: K, value: V) -> None:
        self._entries[key] = value
        if len(self._entries) > self._size:
            self._entries.popitem(last=False)

    def keep(self, keys: Mapping[K, object]) -> None:
        """Drop all others."""
        for key in self._entries.keys() - keys.keys():
            del self._entries[key]


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
    """A voice cannot be stored, read or deleted. reason: "full", "exists", "gone" (deleted in the
    meantime), "damaged" (its file holds no latents that can be spoken with), "disk_full" or "disk"."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class _Header(msgspec.Struct, frozen=True):
    """Of a safetensors file."""

    metadata: dict[str, str] = msgspec.field(name="__metadata__")


class VoiceStore:
    """Uploaded voices. Thread-safe. The directory is created with the first voice."""

    def __init__(self, directory: Path, max_voices: int) -> None:
        self._directory = directory
        self.max_voices = max_voices
        self._lock = threading.Lock()
        self._cache: LruCache[str, dict[str, np.ndarray]] = LruCache(CACHED_VOICES)
        self._voices: dict[str, Voice] = {}
        self._changed = -1
        """Modification time of the directory when it was last read (ns); -1: it must be read again."""
        self._warned: set[str] = set()
        """Voices that could not be read, and "" for the directory."""
        _remove_abandoned(directory)
        self._read_changes()

    def _refresh(self) -> None:
        """Read what has changed. While the directory cannot be read, as one on a network that is away, the voices that
        are known stay."""
        try:
            self._read_changes()
            self._warned.discard("")
        except OSError as error:
            if "" not in self._warned:
                log.error("the directory of voices cannot be read: %s", error)
            self._warned.add("")

    def _read_changes(self) -> None:
        try:
            changed = self._directory.stat().st_mtime_ns
            if changed == self._changed and time.time_ns() - changed > CLOCK_TICK:
                return
            ids = {path.stem for path in self._directory.iterdir() if path.suffix == SUFFIX and ID.fullmatch(path.stem)}
        except FileNotFoundError:
            changed, ids = -1, set()
        self._voices = {id_: voice for id_, voice in self._voices.items() if id_ in ids}
        self._cache.keep(self._voices)
        for id_ in sorted(ids - self._voices.keys()):
            try:
                self._voices[id_] = self._read(id_)
            except FileNotFoundError:
                pass
            except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
                if isinstance(error, OSError):  # as of a network that is away
                    changed = -1
                if id_ not in self._warned:
                    log.warning("voice %s cannot be read and is skipped: %s", id_, error)
                self._warned.add(id_)
        self._changed = changed

    def _read(self, id_: str) -> Voice:
        with self._path(id_).open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = msgspec.json.decode(file.read(min(size, LARGEST_HEADER)), type=_Header)
        voice = msgspec.json.decode(header.metadata.get("voice", ""), type=Voice)
        if voice.id != id_:
            raise msgspec.ValidationError(f"it is the voice {voice.id}")
        return voice

    def _path(self, id_: str) -> Path:
        return self._directory / f"{id_}{SUFFIX}"

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
            self._refresh()
            if self._by_name(name, owner) is not None:
                raise VoiceStoreError("exists", "a voice of that name exists already; delete it first")
            if (stored := len(self._voices)) >= self.max_voices:
                message = f"too many voices: {stored} stored, at most {self.max_voices} allowed; delete one first"
                raise VoiceStoreError("full", message)

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
        """Store a voice. latents: "reference" and, with ref_text, "prompt": float32 [patches, frames, channels].

        Raises VoiceStoreError and then leaves nothing on disk.
        """
        id_ = f"voice_{secrets.token_hex(12)}"
        voice = Voice(id_, name, encoder, consent, int(time.time()), round(seconds, 3), ref_text, description, owner)
        data = save(dict(latents), {"voice": msgspec.json.encode(voice).decode()})
        try:
            # Written without the lock: the event loop takes it for look-ups, and disks can be slow.
            with _written(self._path(id_), data) as unfinished:
                self.check_room(name, owner)
                unfinished.rename(self._path(id_))
            _sync_directory(self._directory)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._path(id_).unlink(missing_ok=True)
            log.error("voice %s cannot be stored: %s", id_, error)
            if no_space(error):
                raise VoiceStoreError("disk_full", "the disk that stores voices is full") from error
            raise VoiceStoreError("disk", "the voice cannot be written to disk") from error
        with self._lock:
            self._voices[id_] = voice
        return voice

    def delete(self, id_: str) -> None:
        """VoiceStoreError when there is no such voice, or it cannot be deleted and stays."""
        with self._lock:
            self._refresh()
            try:
                if id_ not in self._voices:
                    raise FileNotFoundError
                self._path(id_).unlink()
            except FileNotFoundError as error:
                raise VoiceStoreError("gone", "the voice was deleted") from error
            except OSError as error:
                log.error("voice %s cannot be deleted: %s", id_, error)
                raise VoiceStoreError("disk", "the voice cannot be deleted from disk") from error
            finally:
                self._changed = -1
            del self._voices[id_]
            self._cache.keep(self._voices)

    def cached(self, voice: Voice) -> dict[str, np.ndarray] | None:
        """`latents`, if they are in memory."""
        with self._lock:
            return self._cache.get(voice.id)

    def latents(self, voice: Voice) -> dict[str, np.ndarray]:
        """Tensors "reference" and, if the voice has a transcript, "prompt". VoiceStoreError when it was deleted, or
        its file is damaged."""
        cached = self.cached(voice)
        if cached is not None:
            return cached
        try:
            tensors = load_file(self._path(voice.id))
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
                self._cache.put(voice.id, tensors)
        return tensors


def latents_problem(latents: np.ndarray) -> str | None:
    """What is wrong with latents that a file holds; None for float32 [patches, frames, channels] that can be spoken
    with; those of audio are of the order of 1."""
    if latents.dtype != np.float32:
        return f"are {latents.dtype}, not float32"
    if latents.ndim != 3 or not latents.size:
        return f"have the shape {list(latents.shape)}, not [patches, frames, channels]"
    return None if (np.abs(latents) <= LARGEST_LATENT).all() else f"hold values beyond {LARGEST_LATENT:g}, or NaN"


@contextlib.contextmanager
def _written(path: Path, data: bytes) -> Iterator[Path]:
    """Write data beside `path`, to be renamed in the body; meanwhile no other process puts a file there."""
    unfinished = path.with_name(f"{UNFINISHED}{secrets.token_hex(8)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(unfinished, data)
        descriptor = os.open(path.parent, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield unfinished
        finally:
            os.close(descriptor)
    finally:
        with contextlib.suppress(OSError):  # a file system that is read-only says so even of files that are not there
            unfinished.unlink()


def _write(path: Path, data: bytes) -> None:
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_abandoned(directory: Path) -> None:
    """Delete what servers that were killed left behind; recent files may still be written."""
    limit = time.time() - ABANDONED_SECONDS
    for path in directory.glob(f"{UNFINISHED}*"):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime < limit:
                path.unlink()


# Built-in voices

FOLDER = ".named"
REFERENCE = "reference"
SHIPPED = "built_in_voices.npz"
WEIGHTS = (".safetensors", ".pth")
BLOCKS = 256
"""Number of evenly spaced blocks of each file of weights that are hashed: different weights differ in some of them, and
all are read in milliseconds."""
BLOCK_BYTES = 4096


@cache
def weights_of(directory: Path) -> str:
    """A hash that distinguishes checkpoints in folders of the same name: of the sizes of their weights, and of samples
    of the contents. Computed once in a process, as the weights are read once."""
    digest = hashlib.sha256()
    for path in sorted(path for path in directory.glob("*") if path.suffix in WEIGHTS):
        size = path.stat().st_size
        digest.update(f"{path.name}\n{size}\n".encode())
        with path.open("rb") as file:
            for block in range(BLOCKS):
                file.seek(block * max(0, size - BLOCK_BYTES) // (BLOCKS - 1))
                digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


def voice_key(*parts: str) -> str:
    """A file name that identifies the sources of a voice."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def load_named(directory: Path, key: str, checkpoint: Path | None = None) -> np.ndarray | None:
    """float32 [patches, frames, channels] of the directory of voices or of the checkpoint's own; None if there is none,
    or it cannot be read."""
    path = directory / FOLDER / f"{key}{SUFFIX}"
    try:
        reference: np.ndarray | None = load_file(path).get(REFERENCE)
        problem: object = "it has no reference" if reference is None else latents_problem(reference)
    except FileNotFoundError:
        return None if checkpoint is None else load_shipped(checkpoint).get(key)
    except (OSError, SafetensorError, TypeError) as error:
        problem = error
    if problem is not None:
        log.warning("the reference %s of a built-in voice cannot be used and is made again: %s", path.name, problem)
        return None
    return reference


@cache
def load_shipped(checkpoint: Path) -> dict[str, np.ndarray]:
    """References of built-in voices that come with a checkpoint, by key; weights that have changed since have other
    keys."""
    try:
        with np.load(checkpoint / SHIPPED) as voices:
            return dict(voices)
    except FileNotFoundError:
        return {}


def save_named(directory: Path, key: str, reference: np.ndarray) -> None:
    """Store a voice. A readable one that exists already is kept, so that servers that share the directory and make a
    voice at the same time agree on the first. If the disk fails, the voice lasts as long as the process."""
    path = directory / FOLDER / f"{key}{SUFFIX}"
    try:
        _remove_abandoned(path.parent)
        with _written(path, save({REFERENCE: reference})) as unfinished:
            if load_named(directory, key) is None:
                unfinished.rename(path)
    except OSError as error:
        log.warning("the reference of a built-in voice cannot be stored: %s", error)
