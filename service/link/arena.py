"""Memory that an API process shares with an engine, for the large frames of messages: pixels and audio.

A file without a name, in which the API process places frames, and whose mapping the engine reads them from. Its first
page is a table of int64 words: the first says that the engine has mapped the file; each other one belongs to a region
and holds its generation while the region is in use. The API process writes it, the engine clears it when it needs the
frames no longer. Every word has one writer at a time, so there is no lock.
"""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
import threading
import weakref
from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import msgspec
import numpy as np

from service.link.wire import Frame, WireError

log = logging.getLogger(__name__)

SIZE = 128 << 20
"""Bytes of the file: 42 pictures of 1024 x 1024, or 222 of 448 x 448. It takes memory as it needs it."""
GROWTH = 4 << 20
"""Bytes that it begins with, and the least that it grows by. New memory takes ten times as long to write as memory that
was used before, so a thread prepares it, and messages that have no room meanwhile are not placed."""
KEPT = 16 << 20
"""Bytes that keep their memory when no region is in use."""
IDLE = 60
"""Heartbeats without a region in use, until the rest is given back: half a minute."""
ALIGNMENT = 64
TABLE_BYTES = 4096
NAME = "frames"
"""Of the file, where the system lists descriptors."""
_WORDS = TABLE_BYTES // 8
_SEALS = ("F_ADD_SEALS", "F_GET_SEALS", "F_SEAL_SHRINK", "F_SEAL_GROW", "F_SEAL_SEAL")


def is_supported() -> bool:
    """Whether this system has such files: Linux alone."""
    return hasattr(os, "memfd_create") and all(hasattr(fcntl, name) for name in _SEALS)


class Loan(msgspec.Struct, frozen=True, array_like=True):
    """Where frames of a message lie. parts: the number of each, from 0 behind the first, and its bytes; they lie one
    behind the other from `offset`, each aligned."""

    slot: int
    generation: int
    offset: int
    parts: tuple[tuple[int, int], ...]


@dataclass(frozen=True, order=True)
class Region:
    """start, stop: bytes of the file."""

    start: int
    stop: int
    slot: int
    generation: int


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class Arena:
    """The API process' side. OSError if the system gives no such file."""

    def __init__(self, size: int) -> None:
        self.file = os.memfd_create(NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.file)
        os.ftruncate(self.file, size)
        # The engine would be killed by reading past the end of a file that has become shorter.
        fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
        os.posix_fallocate(self.file, 0, TABLE_BYTES)
        self._map = mmap.mmap(self.file, size)
        self._bytes = memoryview(self._map)
        self._words = self._bytes[:TABLE_BYTES].cast("q")
        self._most = size
        self._backed = TABLE_BYTES
        """The file has memory up to here. Set by the thread while one runs."""
        self._growing: threading.Thread | None = None
        self._grow(GROWTH)
        self._regions: list[Region] = []
        """Those in use, by their place."""
        self._idle = 0
        self._slots = list(range(_WORDS - 1, 0, -1))
        self._generations = count(1)

    @property
    def is_mapped(self) -> bool:
        """Whether the engine has mapped it."""
        return bool(self._words[0])

    @property
    def in_use(self) -> int:
        """Number of regions that the engine has not given back."""
        self._reclaim()
        return len(self._regions)

    def place(self, frames: Sequence[tuple[int, Frame]]) -> tuple[Loan, Region] | None:
        """Copies frames, given with their numbers, into a region; None if there is no room."""
        self._reclaim()
        start = self._room(sum(_aligned(len(frame)) for _, frame in frames))
        if start is None or not self._slots:
            return None
        at = start
        for _, frame in frames:
            self._bytes[at : at + len(frame)] = frame
            at += _aligned(len(frame))
        region = Region(start, at, self._slots.pop(), next(self._generations))
        insort(self._regions, region)
        self._words[region.slot] = region.generation
        parts = tuple((number, len(frame)) for number, frame in frames)
        return Loan(region.slot, region.generation, start, parts), region

    def take_back(self, region: Region) -> None:
        """Frees a region whose message was not sent."""
        self._words[region.slot] = 0

    def trim(self) -> None:
        """Called at each heartbeat of the engine. Gives back memory that was needed once, when no region has been in
        use at the last IDLE of them."""
        self._reclaim()
        self._idle = 0 if self._regions else self._idle + 1
        if self._idle >= IDLE and self._backed > KEPT and not self._grows:
            self._map.madvise(mmap.MADV_REMOVE, KEPT, self._backed - KEPT)
            self._backed = KEPT

    def wait_grown(self) -> None:
        """Waits until it does not grow."""
        if self._growing is not None:
            self._growing.join()

    def _room(self, size: int) -> int | None:
        """Begin of the first gap of so many bytes: the lower, the likelier both processes have its pages mapped."""
        start = TABLE_BYTES
        for region in self._regions:
            if region.start - start >= size:
                break
            start = region.stop
        if start + size <= self._backed:
            return start
        if start + size <= self._most and not self._grows:
            self._grow(max(start + size, 2 * self._backed))
        return None

    @property
    def _grows(self) -> bool:
        return self._growing is not None and self._growing.is_alive()

    def _grow(self, stop: int) -> None:
        """Begins to prepare memory up to `stop`, or somewhat further."""
        stop = min(-(-stop // GROWTH) * GROWTH, self._most)
        self._growing = threading.Thread(target=self._prepare, args=(stop,), name="arena", daemon=True)
        self._growing.start()

    def _prepare(self, stop: int) -> None:
        begin = self._backed
        try:
            # Without memory left, this is refused, where writing would kill the process.
            os.posix_fallocate(self.file, begin, stop - begin)
        except OSError as error:
            log.warning("shared memory for pixels stays at %d bytes: %s", begin, error)
            self._most = begin
            return
        np.frombuffer(self._map, np.uint8)[begin : stop : mmap.PAGESIZE] = 0
        self._backed = stop

    def _reclaim(self) -> None:
        words = self._words
        kept = [region for region in self._regions if words[region.slot] == region.generation]
        if len(kept) < len(self._regions):
            self._slots += [region.slot for region in self._regions if words[region.slot] != region.generation]
            self._regions = kept


class MappedArena:
    """The engine's side. WireError for a file that is not an arena; OSError if it cannot be mapped."""

    def __init__(self, file: int) -> None:
        self._size = os.fstat(file).st_size
        if self._size <= TABLE_BYTES or not fcntl.fcntl(file, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise WireError(f"a file of {self._size} bytes that can become shorter is not an arena")
        self._map = mmap.mmap(file, self._size)
        self._words = memoryview(self._map)[:TABLE_BYTES].cast("q")
        self._words[0] = 1

    def borrow(self, loan: Loan, frames: list[Frame]) -> None:
        """Sets the lent ones of a message's array frames. They are read-only; the region is given back when no array
        is left that lies in it. WireError if the loan is not valid."""
        slots = 0 < loan.slot < _WORDS
        if not slots or loan.generation < 1 or self._words[loan.slot] != loan.generation:
            raise WireError(f"region {loan.slot} of shared memory is not of generation {loan.generation}")
        length = sum(_aligned(size) for _, size in loan.parts)
        fits = TABLE_BYTES <= loan.offset <= loan.offset + length <= self._size and loan.offset % ALIGNMENT == 0
        numbers = {number for number, size in loan.parts if 0 <= number < len(frames) and size > 0}
        if not fits or not loan.parts or len(numbers) < len(loan.parts):
            self._release(loan.slot, loan.generation)
            raise WireError(f"frames at {loan.offset} of {self._size} bytes of shared memory: {loan.parts}")
        region = np.frombuffer(self._map, np.uint8, length, loan.offset)
        region.flags.writeable = False
        # All arrays over its parts refer to this one.
        weakref.finalize(region, self._release, loan.slot, loan.generation).atexit = False
        at = 0
        for number, size in loan.parts:
            frames[number] = region[at : at + size].data
            at += _aligned(size)

    def _release(self, slot: int, generation: int) -> None:
        if self._words[slot] == generation:
            self._words[slot] = 0
