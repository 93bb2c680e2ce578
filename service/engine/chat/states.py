"""Rows of recurrent state: those of running sequences, and snapshots, from which a prompt with a cached prefix goes on.

A running sequence holds two rows. A chunk reads one and writes the other, so that its launch can be repeated. A decode
step advances the state in place, but at a multiple of STATE_INTERVAL positions it writes the other row and swaps the
two (service.engine.chat.steps.advance_states), which then holds the state at the last such boundary.

A snapshot is a row that nobody writes any more, indexed by the digest of the page that ends where it was taken. It can
be found while that page is cached. When a row is needed, the least recently used one goes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import replace

from models.layers.kv_cache import STATE_INTERVAL
from service.engine.chat.sequence import ChatSequence, Chunk
from service.engine.core.pages import Digest, PagePool

ROWS_EACH = 3
"""Rows for each slot that the pool must have: the two of a sequence, and the snapshot that it begins with."""
MOST_EACH = 8
"""Rows for each slot that are of use at most: snapshots of more conversations than that are seldom asked for again."""
PROMPT_TAIL = 8
"""The last tokens of a prompt, which the next turn may not repeat: a template opens an answer with <think>, and leaves
that out of the conversation later."""


class StatePool:
    """Rows 1..num_rows-1; row 0 is scratch."""

    def __init__(self, num_rows: int, pages: PagePool, *, pending: bool = False) -> None:
        """pages: with the keys of the layers that have a cache. pending: decode steps leave their own tokens out of the
        state (service.engine.chat.steps.advance_pending)."""
        self._pending = pending
        self.rows = PagePool(num_rows, STATE_INTERVAL)
        self._page_size = pages.page_size
        pages.evicted = self.rows.forget

    def look_up(self, sequence: ChatSequence, prefilling: Iterable[ChatSequence]) -> None:
        """Shortens a hit in the page cache to the last snapshot inside it, and plans the snapshots of the prefill: near
        the end of the prompt, for the next turn, and where the prompt parts from others that are cached or computed."""
        common = max((_common(sequence, other) for other in prefilling), default=0)
        shared = max(sequence.hit_pages, sequence.largest_hit(common)) * self._page_size // STATE_INTERVAL
        hit = sequence.hit_pages * self._page_size // STATE_INTERVAL
        while hit and self._digest(sequence, hit * STATE_INTERVAL) not in self.rows:
            hit -= 1
        sequence.hit_pages = hit * STATE_INTERVAL // self._page_size
        last = max(0, sequence.num_prompt_tokens - PROMPT_TAIL) // STATE_INTERVAL
        sequence.snapshot_ends = [end * STATE_INTERVAL for end in sorted({min(shared, last), last}) if end > hit]

    def awaited(self, sequence: ChatSequence, prefilling: Iterable[ChatSequence]) -> bool:
        """Whether a prompt that is being computed will leave a snapshot further on in this one."""
        found = sequence.hit_pages * self._page_size
        for other in prefilling:
            common = sequence.largest_hit(_common(sequence, other)) * self._page_size
            if any(max(found, other.num_prefilled) < end <= common for end in other.snapshot_ends):
                return True
        return False

    def admit(self, sequence: ChatSequence) -> None:
        """Takes the rows of a sequence: ROWS_EACH for each slot are always enough."""
        digests = [self._digest(sequence, sequence.hit_pages * self._page_size)] if sequence.hit_pages else []
        sequence.state_read = (self.rows.share(digests) or [0])[0]
        sequence.state_rows = self.rows.allocate(2)

    def cut(self, sequence: ChatSequence, start: int, length: int) -> int:
        """How many of the `length` tokens from `start` a chunk takes: to a multiple of STATE_INTERVAL or the end of the
        prompt, with one snapshot at most."""
        end = start + length
        if end < sequence.num_tokens:
            end -= end % STATE_INTERVAL
        inside = [snapshot for snapshot in sequence.snapshot_ends if start < snapshot <= end]
        if len(inside) > 1:
            end = inside[0]
        return max(0, end - start)

    def with_snapshot(self, chunk: Chunk) -> Chunk:
        """The chunk with a row for the snapshot that is planned inside it, if there is one."""
        end = next((end for end in chunk.sequence.snapshot_ends if chunk.start < end <= chunk.end), 0)
        if not end or not self.rows.num_available:
            return chunk
        (chunk.sequence.snapshot_row,) = self.rows.allocate(1)
        return replace(chunk, snapshot_end=end)

    def launched(self, chunk: Chunk) -> None:
        """Records that a chunk was launched: the next one reads what it writes, and its snapshot is findable."""
        sequence = chunk.sequence
        if sequence.state_read not in (0, *sequence.state_rows):
            self.rows.release([sequence.state_read])
        sequence.state_rows.reverse()
        sequence.state_read = 0 if chunk.is_last else sequence.state_rows[0]
        if sequence.snapshot_row:
            self._keep(sequence, sequence.snapshot_row, chunk.snapshot_end)
            sequence.snapshot_row = 0

    def keep_last(self, sequence: ChatSequence, num_keys: int) -> int:
        """Makes a snapshot of the last boundary that the decode steps of a sequence passed, if its tokens up to there
        are known; returns its position, or 0.

        num_keys: positions whose keys launched steps write. A row that has stopped on the device passes no boundary,
        but its steps count, too. If the token at the boundary is known, it had not stopped there. With drafts the last
        boundary is unknown if launched steps that have not been read may pass one.
        """
        if self._pending:
            num_keys -= 1
            at_least = max(sequence.num_stated, sequence.num_prefilled)
            if (at_least - 1) // STATE_INTERVAL != (num_keys - 1) // STATE_INTERVAL:
                return 0
        end = (num_keys - 1) // STATE_INTERVAL * STATE_INTERVAL
        first = -(-sequence.num_prefilled // STATE_INTERVAL) * STATE_INTERVAL
        if not first <= end < sequence.num_tokens:
            return 0
        sequence.extend_digests(end)
        swaps = 1 + (end - first) // STATE_INTERVAL
        self._keep(sequence, sequence.state_rows.pop((1 + swaps) % 2), end)
        return end

    def release(self, sequence: ChatSequence) -> None:
        """Takes back the rows of a sequence."""
        rows = {*sequence.state_rows, sequence.state_read, sequence.snapshot_row} - {0}
        self.rows.release([*rows])
        sequence.state_rows, sequence.state_read, sequence.snapshot_row = [], 0, 0

    def _keep(self, sequence: ChatSequence, row: int, end: int) -> None:
        """Gives a row up as the snapshot after `end` tokens of a sequence."""
        self.rows.index(row, self._digest(sequence, end))
        self.rows.release([row])

    def _digest(self, sequence: ChatSequence, end: int) -> Digest:
        return sequence.digests[end // self._page_size - 1]


def _common(sequence: ChatSequence, other: ChatSequence) -> int:
    """Number of leading pages that two sequences have in common. A digest covers all pages before its own."""
    mine, theirs = sequence.digests, other.digests
    return bisect_left(range(min(len(mine), len(theirs))), True, key=lambda page: mine[page] != theirs[page])
