"""Uploaded voices on disk: each a directory with the encoded latents and what is known of it.

A voice appears under its final name in one rename, whole or not at all, and survives a restart without being encoded
again. Servers may share the directory: each sees what the others keep and delete. Names of files and directories are
ids made here; nothing of a client's input gets into a path.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import shutil
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

log = logging.getLogger(__name__)

METADATA = "voice.json"
LATENTS = "latents.safetensors"
UNFINISHED = ".unfinished-"
ABANDONED_SECONDS = 3600.0
"""An unfinished upload as old as this is nobody's any more."""
CLOCK_TICK = 2_000_000_000
"""Two changes of a directory that are this near (ns) may bear the same time."""
CACHED_LATENTS = 32
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""No room left: on the device, in the quota, under the limit on a file's size."""
TENSORS = frozenset({"reference", "prompt"})


class Voice(msgspec.Struct, frozen=True):
    """encoder: what its latents were made by; a voice speaks through no other checkpoint. created_at: Unix time.
    ref_text: what the clip says. seconds: length of the clip."""

    id: str
    name: str
    encoder: str
    consent: str
    created_at: int
    seconds: float
    ref_text: str | None = None
    description: str | None = None


class VoiceStoreError(Exception):
    """A voice could not be kept. reason: "full" (as many as allowed), "exists" (the name), "disk_full", "disk"."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class VoiceStore:
    """Thread-safe. The directory is made when the first voice is kept."""

    def __init__(self, directory: Path, max_voices: int) -> None:
        self._directory = directory
        self._max_voices = max_voices
        self._lock = threading.Lock()
        self._cache: OrderedDict[str, dict[str, np.ndarray]] = OrderedDict()
        self._voices: dict[str, Voice] = {}
        self._changed = -1
        """When the directory last changed, as far as is known here (ns)."""
        self._remove_abandoned()
        self._refresh()

    def _remove_abandoned(self) -> None:
        """What interrupted uploads left behind; those of other servers may be under way."""
        limit = time.time() - ABANDONED_SECONDS
        for path in self._directory.glob(f"{UNFINISHED}*"):
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_mtime < limit:
                    shutil.rmtree(path, ignore_errors=True)

    def _refresh(self) -> None:
        """Takes over what has changed on disk since the last call; what cannot be read is left out."""
        try:
            changed = self._directory.stat().st_mtime_ns
            if changed == self._changed and time.time_ns() - changed > CLOCK_TICK:
                return
            names = [path.name for path in self._directory.iterdir() if not path.name.startswith(UNFINISHED)]
        except FileNotFoundError:
            changed, names = -1, []
        self._changed = changed
        self._voices = {name: self._voices[name] for name in names if name in self._voices}
        for name in sorted(set(names) - self._voices.keys()):
            voice = self._read(self._directory / name)
            if voice is not None:
                self._voices[name] = voice

    def _read(self, path: Path) -> Voice | None:
        try:
            voice = msgspec.json.decode((path / METADATA).read_bytes(), type=Voice)
        except (OSError, msgspec.DecodeError) as error:
            log.warning("voice %s cannot be read and is left out: %s", path.name, error)
            return None
        return voice if voice.id == path.name and (path / LATENTS).is_file() else None

    def voices(self) -> list[Voice]:
        with self._lock:
            self._refresh()
            return sorted(self._voices.values(), key=lambda voice: (voice.created_at, voice.id))

    def find(self, key: str) -> Voice | None:
        """By id or by name."""
        with self._lock:
            self._refresh()
            return self._voices.get(key) or self._by_name(key)

    def _by_name(self, name: str) -> Voice | None:
        return next((voice for voice in self._voices.values() if voice.name.casefold() == name.casefold()), None)

    def check_room(self, name: str) -> None:
        """VoiceStoreError when a voice of that name cannot be kept: ask before the clip is encoded."""
        with self._lock:
            self._check_room(name)

    def _check_room(self, name: str) -> None:
        self._refresh()
        if self._by_name(name) is not None:
            raise VoiceStoreError("exists", "a voice of that name exists; delete it first")
        if len(self._voices) >= self._max_voices:
            raise VoiceStoreError("full", f"{self._max_voices} voices are kept already; delete one first")

    def add(
        self,
        *,
        name: str,
        encoder: str,
        consent: str,
        seconds: float,
        latents: Mapping[str, np.ndarray],
        ref_text: str | None = None,
        description: str | None = None,
    ) -> Voice:
        """Keeps a voice. latents: "reference" and, with ref_text, "prompt": float32 [patches, frames, channels].

        Raises VoiceStoreError; nothing is left on disk then.
        """
        id_ = f"voice_{secrets.token_hex(12)}"
        voice = Voice(id_, name, encoder, consent, int(time.time()), round(seconds, 3), ref_text, description)
        unfinished, final = self._directory / f"{UNFINISHED}{id_}", self._directory / id_
        try:
            # Not under the lock, which look-ups in the event loop take: disks can be slow.
            unfinished.mkdir(parents=True)
            _write(unfinished / LATENTS, save(dict(latents)))
            _write(unfinished / METADATA, msgspec.json.encode(voice))
            with self._lock:
                self._check_room(name)
                unfinished.rename(final)
                self._voices[id_] = voice
            _sync_directory(self._directory)
        except OSError as error:
            with self._lock:
                self._voices.pop(id_, None)
            shutil.rmtree(final, ignore_errors=True)
            log.error("voice %s cannot be kept: %s", id_, error)
            if error.errno in DISK_FULL:
                raise VoiceStoreError("disk_full", "the disk for voices is full") from error
            raise VoiceStoreError("disk", "the voice cannot be written to disk") from error
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
        return voice

    def delete(self, id_: str) -> None:
        """KeyError for an id that is not kept."""
        with self._lock:
            self._refresh()
            del self._voices[id_]
            self._cache.pop(id_, None)
            # Out of sight in one step; what a crash leaves of it is removed by a later start.
            doomed = self._directory / f"{UNFINISHED}{id_}"
            try:
                (self._directory / id_).rename(doomed)
            except FileNotFoundError as error:
                raise KeyError(id_) from error
        shutil.rmtree(doomed, ignore_errors=True)

    def cached(self, voice: Voice) -> dict[str, np.ndarray] | None:
        """`latents` if they are in memory."""
        with self._lock:
            cached = self._cache.get(voice.id)
            if cached is not None:
                self._cache.move_to_end(voice.id)
            return cached

    def latents(self, voice: Voice) -> dict[str, np.ndarray]:
        """ "reference" and perhaps "prompt". VoiceStoreError when the file is gone or damaged."""
        cached = self.cached(voice)
        if cached is not None:
            return cached
        try:
            tensors = load_file(self._directory / voice.id / LATENTS)
        except (OSError, SafetensorError) as error:
            log.error("latents of voice %s cannot be read: %s", voice.id, error)
            raise VoiceStoreError("disk", "the voice's latents cannot be read") from error
        if "reference" not in tensors or not tensors.keys() <= TENSORS:
            raise VoiceStoreError("disk", "the voice's latents are not those of a voice")
        with self._lock:
            self._cache[voice.id] = tensors
            if len(self._cache) > CACHED_LATENTS:
                self._cache.popitem(last=False)
        return tensors


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
