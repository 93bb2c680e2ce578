"""The masks of a step's guided rows, requested while its layers run, from tokens that are on their way to the host.

A MaskJob is made when the layers are launched. Once the previous tokens have arrived, it requests the masks from the
mask servers. Meanwhile the engine's thread reads and sends those tokens, and launches the sampling when the masks are
computed. mask_table.py copies them to the device.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from service.engine.chat.guide import Guide
from service.engine.chat.guided.mask_server import Computed
from service.engine.core.readback import Readback

_MAX_WAIT = 0.004
"""Seconds that the engine waits for masks before it looks for commands again."""


class MaskServers(Protocol):
    """The mask servers, as a MaskJob sees them."""

    def compute(self, job: MaskJob, server: int, first: int, rows: list[tuple[int, list[int]]]) -> None:
        """Requests masks of a server, from place `first` on, for guides and the tokens that their matchers have not
        seen. `receive` calls `job.finish` with the reply."""
        ...

    def receive(self, seconds: float) -> None:
        """Handles the replies that have come; waits up to `seconds` for the first one."""
        ...


Unread = Sequence[tuple[Readback, int]]
"""Where the tokens of a sequence that were sampled but not read yet will arrive: rows of results, the oldest first."""


@dataclass(eq=False, slots=True)
class GuidedRow:
    """A guided row of a step. tokens: those of its answer that its matcher has not seen; unread ones are appended.
    stopped: one of them is a stop token."""

    guide: Guide
    tokens: list[int]
    unread: Unread
    stopped: bool = False


class MaskJob:
    """The masks of one step, from the request for them until all have been computed.

    rows: int64 [rows of the step], the row of SlotState.allowed where the mask of each row is; 0 for those without one.
    count: number of masks. verdicts: by row, for the rows that do not go on (service.engine.chat.guided.mask_server).
    These three are complete once
        it is done.
    awaited: the results that it reads first.
    """

    def __init__(self, wanted: Mapping[int, GuidedRow], num_rows: int, servers: MaskServers) -> None:
        """wanted: the guided rows, by row of the step, which has `num_rows`."""
        self._wanted = wanted
        self._servers = servers
        self._asked: list[int] = []
        """Rows whose masks were asked for, in the order of these."""
        self._requested = False
        self._missing = 0
        """Number of masks that have not been computed yet."""
        self.rows = np.zeros(num_rows, np.int64)
        self.count = 0
        self.verdicts: dict[int, str] = {}
        self.awaited = list({readback: None for row in wanted.values() for readback, _ in row.unread})
        self.seconds = 0.0
        """Seconds that the slowest server took."""
        self.ask_when_ready()

    @property
    def done(self) -> bool:
        return self._requested and not self._missing

    def ask_when_ready(self) -> None:
        """Requests the masks, once, if the previous tokens have arrived."""
        if not self._requested and all(readback.ready() for readback in self.awaited):
            self._fetch()
            self._ask()

    def wait(self) -> None:
        """Waits until the previous tokens have arrived, then for the masks, or for a while."""
        if not self._requested:
            for readback in self.awaited:
                readback.wait()
            self.ask_when_ready()
            return
        until = time.monotonic() + _MAX_WAIT
        while self._missing and (left := until - time.monotonic()) > 0:
            self._servers.receive(left)

    def finish(self, first: int, count: int, computed: Computed) -> None:
        """Takes in `count` of the masks that were asked for, from `first` on."""
        self.verdicts |= {self._asked[first + place]: verdict for place, verdict in computed.verdicts.items()}
        self.seconds = max(self.seconds, computed.seconds)
        self._missing -= count

    def _fetch(self) -> None:
        """Appends the tokens that the engine has not read."""
        results = {readback: readback.read()["results"].tolist() for readback in self.awaited}
        for row in self._wanted.values():
            for readback, place in row.unread:
                token, stopped = results[readback][place]
                if stopped:
                    row.stopped = True
                row.tokens.append(token)

    def _ask(self) -> None:
        self._requested = True
        by_server: dict[int, list[int]] = {}
        for row, wanted in self._wanted.items():
            guide = wanted.guide
            if wanted.stopped or guide.ended:
                continue  # Its sequence has ended, or ends when these tokens are read.
            if guide.problem:
                self.verdicts[row] = guide.problem
            else:
                guide.num_consumed += len(wanted.tokens)
                by_server.setdefault(guide.server, []).append(row)
        self._asked = [row for rows in by_server.values() for row in rows]
        self.count = self._missing = len(self._asked)
        first = 0
        for server, rows in by_server.items():
            asked = [(self._wanted[row].guide.number, self._wanted[row].tokens) for row in rows]
            self._servers.compute(self, server, first, asked)
            first += len(rows)
        self.rows[self._asked] = range(1, 1 + self.count)
