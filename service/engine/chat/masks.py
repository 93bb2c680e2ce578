"""The masks of a step's guided rows, beside its layers: from tokens on their way to the host to words on the device.

A MaskJob is asked for when the layers are launched. Its thread waits by itself for the tokens before them, advances
the matchers, computes which tokens may follow and copies the masks up on a stream of their own. The engine's thread
launches the sampling behind that copy, and only then reads those tokens, too.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Protocol

import llguidance
import numpy as np
import torch
from torch import Tensor

from service.engine.readback import Readback

log = logging.getLogger(__name__)

_MANY_ROWS = 4
"""Tokens of fewer rows are consumed by one thread: each may then have to wait for the interpreter lock."""
_LATE = 0.004
"""Seconds after which nothing waits for masks any more that need not."""
_LONGEST_REASON = 200
_NO_TOKEN = "no token can follow"

GOES_ON, COMPLETE = "goes on", "complete"
"""Verdicts on a guided row after its newest token. Any other one says why no token can follow."""


@dataclass(frozen=True)
class _CopyStream:
    """Of masks, on a GPU. sent: behind the last copy; read: on the engine's stream, behind the last launch that reads
    them."""

    stream: torch.cuda.Stream
    sent: torch.cuda.Event
    read: torch.cuda.Event


class MaskTable:
    """The masks of one step, on the host, where llguidance writes them, and on the device (SlotState.allowed).

    words int32 [rows, words]: the host's, written by the thread of a MaskJob between `writable` and `send`.
    """

    def __init__(self, allowed: Tensor) -> None:
        """allowed int32 [1 + rows, words]: row 0 allows everything."""
        self._allowed = allowed
        self._host = torch.zeros(allowed[1:].shape, dtype=torch.int32, pin_memory=allowed.is_cuda)
        self.words: np.ndarray = self._host.numpy()
        self._copies: _CopyStream | None = None
        if allowed.is_cuda:
            self._copies = _CopyStream(torch.cuda.Stream(allowed.device), torch.cuda.Event(), torch.cuda.Event())

    def writable(self) -> None:
        """Returns once nothing is copied from `words` any more."""
        if self._copies is not None:
            self._copies.sent.synchronize()

    def send(self, count: int) -> None:
        """Copies the first `count` masks to rows 1 .. count on the device, behind what reads those there now."""
        with torch.inference_mode():
            target, source = self._allowed[1 : 1 + count], self._host[:count]
            if self._copies is None:
                target.copy_(source)
                return
            with torch.cuda.stream(self._copies.stream):
                self._copies.stream.wait_event(self._copies.read)
                target.copy_(source, non_blocking=True)
                self._copies.sent.record(self._copies.stream)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """What is launched inside reads the masks that were sent last."""
        if self._copies is None:
            yield
            return
        torch.cuda.current_stream().wait_event(self._copies.sent)
        try:
            yield
        finally:
            self._copies.read.record()


class RowGuide(Protocol):
    """The grammar of a row. While a MaskJob works on it, its matcher belongs to the thread of that job."""

    num_consumed: int

    @property
    def matcher(self) -> llguidance.LLMatcher | None: ...


Unread = Sequence[tuple[Readback, int]]
"""Where the tokens of a sequence will be that were sampled and not read yet: rows of results, the oldest first."""


@dataclass(eq=False)
class Wanted:
    """A guided row of a step. tokens: of its answer, those that its matcher has not seen; unread ones come to them.
    stopped: by a stop token among these."""

    guide: RowGuide
    tokens: list[int]
    unread: Unread
    stopped: bool = False


class MaskJob:
    """rows int64 [rows of the step]: of SlotState.allowed, where the row's mask is; 0 for rows without one. verdicts by
    row. Both once it is done. awaited: the results that it reads first."""

    def __init__(
        self,
        wanted: Mapping[int, Wanted],
        num_rows: int,
        table: MaskTable,
        threads: ThreadPoolExecutor,
        executor: llguidance.LLExecutor | None,
    ) -> None:
        self._wanted = wanted
        self._table = table
        self._executor = executor
        self.rows = np.zeros(num_rows, np.int64)
        self.verdicts: dict[int, str] = {}
        self.awaited = list({id(readback): readback for row in wanted.values() for readback, _ in row.unread}.values())
        self.seconds = 0.0
        """From when the tokens could be read until the copy of the masks was launched."""
        self._began: float | None = None
        self._done = threads.submit(self._compute)

    def done(self) -> bool:
        """A computation that raised is done, too: no row of it goes on."""
        if self._done.done() and (problem := self._done.exception()) is not None:
            log.error("masks cannot be computed", exc_info=problem)
            self.verdicts = dict.fromkeys(self._wanted, "its mask cannot be computed")
            self.rows[:] = 0
        return self._done.done()

    @property
    def late(self) -> bool:
        """The tokens have been there for long."""
        return self._began is not None and time.perf_counter() - self._began > _LATE

    def wait(self) -> None:
        """Until it is done, or for a while; once it is late, for as long as it takes."""
        wait((self._done,), None if self.late else _LATE)

    def _compute(self) -> None:
        self._fetch()
        self._began = time.perf_counter()
        matchers = self._matchers()
        self._consume(matchers)
        if matchers:
            self._fill(list(matchers.values()))
            self.rows[list(matchers)] = np.arange(1, 1 + len(matchers))
        # A matcher without a token that can follow, which only its mask shows, is in error now.
        self.verdicts |= {row: _verdict(matcher) for row, matcher in matchers.items()}
        self.seconds = time.perf_counter() - self._began

    def _fetch(self) -> None:
        """Waits for the tokens that have not been read."""
        results = {id(readback): readback.fetch()["results"].tolist() for readback in self.awaited}
        for row in self._wanted.values():
            for readback, place in row.unread:
                token, stopped = results[id(readback)][place]
                row.stopped = row.stopped or bool(stopped)
                row.tokens.append(token)

    def _matchers(self) -> dict[int, llguidance.LLMatcher]:
        """By row; a verdict where there is none."""
        matchers = {}
        for row, wanted in self._wanted.items():
            if wanted.stopped:
                continue  # Its sequence ends when the engine's thread reads that.
            if (matcher := wanted.guide.matcher) is not None:
                matchers[row] = matcher
            else:
                self.verdicts[row] = "it cannot be built for this model's vocabulary"
        return matchers

    def _consume(self, matchers: Mapping[int, llguidance.LLMatcher]) -> None:
        """Advances the matchers by the tokens that they have not seen, one as a rule."""
        single = []
        for row, matcher in matchers.items():
            wanted = self._wanted[row]
            wanted.guide.num_consumed += len(wanted.tokens)
            if len(wanted.tokens) == 1 and self._executor is not None and len(matchers) >= _MANY_ROWS:
                single.append((matcher, wanted.tokens[0]))
            else:
                matcher.consume_tokens(wanted.tokens)
        if self._executor is not None and single:
            self._executor.consume_token_par(single)

    def _fill(self, matchers: list[llguidance.LLMatcher]) -> None:
        """Computes their masks, one after the other in the table, and sends them."""
        self._table.writable()
        words = self._table.words
        address, size = words.ctypes.data, words.strides[0]
        if self._executor is not None:
            pairs = [(matcher, index) for index, matcher in enumerate(matchers)]
            self._executor.unsafe_compute_mask_ptr(pairs, address, size, len(words))
        else:
            for index, matcher in enumerate(matchers):
                matcher.unsafe_compute_mask_ptr(address + size * index, size)
        self._table.send(len(matchers))


def _verdict(matcher: llguidance.LLMatcher) -> str:
    if matcher.is_error():
        error = " ".join(matcher.get_error().split())
        if error.startswith("NoExtension"):
            return _NO_TOKEN
        log.warning("a grammar cannot be followed: %s", error[:_LONGEST_REASON])
        return "it is too complex at this point"
    return COMPLETE if matcher.is_stopped() else GOES_ON
