"""References of built-in voices on disk, next to the uploaded voices: one file for each checkpoint and voice."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import secrets
import time
from functools import cache
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from service.voices.store import ABANDONED_SECONDS, latents_problem

log = logging.getLogger(__name__)

FOLDER = ".named"
UNFINISHED = ".unfinished"
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
    """float32 [patches, frames, channels] of the directory of voices or of the checkpoint's own; None if
    there is none, or it cannot be read."""
    path = directory / FOLDER / f"{key}.safetensors"
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
    """Stores a voice completely or not at all. A readable one that exists already is kept, so that servers that share
    the directory and make a voice at the same time agree on the first. If the disk fails, the voice lasts as long as
    the process."""
    path = directory / FOLDER / f"{key}.safetensors"
    unfinished = path.with_name(f"{key}.{secrets.token_hex(4)}{UNFINISHED}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(path.parent)
        with unfinished.open("xb") as file:
            file.write(save({REFERENCE: reference}))
            file.flush()
            os.fsync(file.fileno())
        _put(unfinished, path)
    except OSError as error:
        log.warning("the reference of a built-in voice cannot be stored: %s", error)
    finally:
        with contextlib.suppress(OSError):  # a file system that is read-only says so even of files that are not there
            unfinished.unlink()


def _remove_abandoned(folder: Path) -> None:
    """Deletes the partial files of servers that were killed while they wrote."""
    limit = time.time() - ABANDONED_SECONDS
    for path in folder.glob(f"*{UNFINISHED}"):
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime < limit:
                path.unlink()


def _put(unfinished: Path, path: Path) -> None:
    try:
        path.hardlink_to(unfinished)
    except FileExistsError:
        if load_named(path.parent.parent, path.stem) is None:
            unfinished.rename(path)
    except OSError:  # the file system has no hard links
        unfinished.rename(path)
