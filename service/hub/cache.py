"""A repository in the cache of huggingface_hub, in the layout that its guides document, so that other tools find it:
blobs/HASH, snapshots/COMMIT/NAME as links to blobs, and refs/REVISION with the commit of a branch or tag.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from huggingface_hub import constants, try_to_load_from_cache

from models.interfaces.errors import CheckpointError
from service.hub.listing import COMMIT, RemoteFile

DEFAULT_REVISION = "main"
_NO_LINKS = frozenset({errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP})


class RepositoryCache:
    """The folder of one repository. Nothing is written before it is needed."""

    def __init__(self, source: str) -> None:
        self.source = source
        self.home = Path(os.path.expanduser(constants.HF_HUB_CACHE))
        if self.home.parts[0].startswith("~"):
            raise CheckpointError(f"{source}: no home is known for the cache {self.home}; set HOME or HF_HOME")
        self._root = self.home / f"models--{source.replace('/', '--')}"

    def snapshot(self, commit: str) -> Path:
        return self._root / "snapshots" / commit

    def find(self, revision: str | None) -> Path | None:
        """The snapshot of a revision that was downloaded earlier, completely or not."""
        config = try_to_load_from_cache(self.source, "config.json", cache_dir=self.home, revision=revision)
        return Path(config).parent if isinstance(config, str) else None

    def blob(self, file: RemoteFile) -> Path:
        return self._root / "blobs" / file.etag

    def partial(self, file: RemoteFile) -> Path:
        """Partial blob; a later attempt, by this process or another, resumes at its end."""
        return self.blob(file).with_name(f"{file.etag}.partial")

    def absent(self, files: Sequence[RemoteFile], commit: str) -> list[RemoteFile]:
        return [file for file in files if not (self.snapshot(commit) / file.name).exists()]

    def remaining(self, file: RemoteFile) -> int:
        """Bytes of `file` that are still missing."""
        if self.blob(file).exists():
            return 0
        partial = self.partial(file)
        return max(0, file.size - partial.stat().st_size) if partial.exists() else file.size

    def require_space(self, files: Sequence[RemoteFile]) -> None:
        """Raises CheckpointError if the disk has less free space than the rest of `files` needs."""
        needed = sum(map(self.remaining, files))
        free = free_bytes(self.home)
        if needed > free:
            raise CheckpointError(
                f"{self.source}: needs {in_bytes(needed)}, {in_bytes(free)} free in {self.home}: free some space, or "
                "set HF_HOME to a directory on another disk"
            )

    def link(self, file: RemoteFile, commit: str) -> None:
        """Gives the blob its name in the snapshot, by a link or, if the file system has none, by moving it."""
        pointer, blob = self.snapshot(commit) / file.name, self.blob(file)
        pointer.parent.mkdir(parents=True, exist_ok=True)
        try:
            pointer.symlink_to(os.path.relpath(blob, pointer.parent))
        except FileExistsError:
            pass  # another process was first
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            os.replace(blob, pointer)

    def remember(self, revision: str | None, commit: str) -> None:
        """Records the commit of a branch or tag, for when the hub cannot be reached."""
        revision = revision or DEFAULT_REVISION
        if not COMMIT.fullmatch(revision):
            ref = self._root / "refs" / revision
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(commit)


@contextmanager
def locked(path: Path, waiting: Callable[[], None]) -> Iterator[BinaryIO]:
    """The file at `path`, opened to append and locked against other processes. waiting: called if another process holds
    the lock. It may rename the file in the meantime; then a new one is made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with path.open("ab") as file:
            # Without file-system locks, the final hash catches a file that two processes wrote.
            with suppress(OSError):
                _lock(file, waiting)
            if path.exists() and path.stat().st_ino == os.fstat(file.fileno()).st_ino:
                yield file
                return


def _lock(file: BinaryIO, waiting: Callable[[], None]) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        waiting()
        fcntl.flock(file, fcntl.LOCK_EX)


def free_bytes(directory: Path) -> int:
    """Free bytes of the disk where `directory` is, or will be."""
    return shutil.disk_usage(next(path for path in (directory, *directory.parents) if path.exists())).free


def in_bytes(count: float) -> str:
    """4_400_000_000 -> "4.4 GB"."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} bytes"
