"""Files that commands write, and standard output in the place of one."""

from __future__ import annotations

import itertools
import os
import stat
import struct
import sys
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

STDOUT = Path("-")
_ITS_NAMES = {STDOUT, Path("/dev/stdout"), Path("/dev/fd/1"), Path("/proc/self/fd/1")}


def is_standard_output(path: Path | None) -> bool:
    return path in _ITS_NAMES


def write_to_standard_output(pieces: Iterator[bytes]) -> None:
    """Each piece at once."""
    for piece in pieces:
        sys.stdout.buffer.write(piece)
        sys.stdout.buffer.flush()


def write_audio(out: Path, chunks: Iterator[bytes], audio_format: str) -> int:
    """Number of bytes written to `out`. If the audio is cut off, a regular file is removed; what was there before stays
    until the first byte is written. Raises OSError that names `out`."""
    first = next(chunks, b"")  # nothing is written if the server refuses
    was_there = os.path.lexists(out)
    size = 0
    try:
        # Without a buffer, so that a full disk is noticed here. What is left of an older file is cut off at the end.
        with open(out, "wb", buffering=0, opener=_opened_as_it_is) as file:
            for chunk in itertools.chain((first,), chunks):
                left = memoryview(chunk)
                while left:
                    written = file.write(left)
                    left, size = left[written:], size + written
            if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                file.truncate(size)
                if audio_format == "wav":
                    _write_lengths(file, size)
    except BaseException as error:
        if (size or not was_there) and out.is_file() and not out.is_symlink():
            out.unlink()
        if isinstance(error, OSError) and error.filename is None:
            error.filename = str(out)
        raise
    return size


def _opened_as_it_is(path: str, flags: int) -> int:
    return os.open(path, flags & ~os.O_TRUNC, 0o666)


def _write_lengths(file: FileIO, size: int) -> None:
    """A streamed WAV header holds no real lengths, and some players trust them."""
    for at in (4, 40):
        file.seek(at)
        file.write(struct.pack("<I", size - at - 4))
