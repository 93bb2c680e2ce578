"""The admitted work of each API process of a server, in memory that all of them map, so that limits count all of it.

A table of int64 [processes, kinds of work, 3]: requests in flight, their bytes, and how often both have changed. Each
process writes only its own row, and single words, so there is no lock. Two processes that look at the same moment may
both take the last place.
"""

from __future__ import annotations

import mmap
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

import numpy as np

WORDS = 3


class UsageTable:
    """The table in a mapped file without a name. kinds: those with limits of their own."""

    def __init__(self, file: int, processes: int, kinds: Sequence[str]) -> None:
        self._kinds = {kind: column for column, kind in enumerate(kinds)}
        shape = (processes, len(kinds), WORDS)
        size = int(np.prod(shape)) * np.dtype(np.int64).itemsize
        self._table = np.frombuffer(mmap.mmap(file, size), np.int64).reshape(shape)

    @staticmethod
    def make_file(processes: int, kinds: Sequence[str]) -> IO[bytes]:
        """A file of zeros for a table, in memory; it lasts as long as a process has it open."""
        file = os.fdopen(os.memfd_create("usage"), "w+b")
        file.truncate(processes * len(kinds) * WORDS * np.dtype(np.int64).itemsize)
        return file

    def clear(self, process: int) -> None:
        self._table[process] = 0

    def row(self, process: int, kinds: Sequence[str] | None = None) -> UsageRow:
        """The columns of these kinds, or all, as the process of that index sees them."""
        return UsageRow(self._table, process, {kind: self._kinds[kind] for kind in kinds or self._kinds})


@dataclass(eq=False)
class UsageRow:
    """The table as one process sees it: it reads the rows of the others, and writes its own."""

    table: np.ndarray
    process: int
    kinds: dict[str, int]

    def requests(self) -> Counter[str]:
        """Requests in flight of the other processes, by kind of work."""
        return self._others(0)

    def num_bytes(self) -> Counter[str]:
        """Bytes of the other processes' requests, by kind of work."""
        return self._others(1)

    def least(self, kind: str) -> int:
        """Least number of requests of any process that has told one, this one among them."""
        told = self.table[:, self.kinds[kind]]
        return int(told[told[:, 2] > 0, 0].min())

    def _others(self, of: int) -> Counter[str]:
        totals = self.table[:, :, of].sum(axis=0) - self.table[self.process, :, of]
        return Counter({kind: int(totals[column]) for kind, column in self.kinds.items()})

    def tell(self, kind: str, requests: int, size: int) -> None:
        """Tell the other processes this one's requests in flight of a kind, and their bytes."""
        own = self.table[self.process, self.kinds[kind]]
        own[:] = (requests, size, own[2] + 1)
