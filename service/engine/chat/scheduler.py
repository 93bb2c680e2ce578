"""Chooses what runs next: continuous batching with chunked prefill over pages and slots.

A step computes chunks of prompts, or advances every decode row by one token. The pages of a prompt are allocated at
admission, those of new tokens as needed. When no page is left, the sequence that was admitted last is preempted: it
goes back to the waiting queue and is computed again later.

A page can be shared from the launch that fills it on, by later steps, which run behind it. A prompt whose next page is
filled for another one in this step waits for the next.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from service.engine.chat.pacing import ChunkBudget
from service.engine.chat.sequence import BlockAllocation, ChatSequence, Chunk, DecodeRows, Step, sampler_needs
from service.engine.chat.states import StatePool
from service.engine.core.pages import Digest, PagePool, SlotPool, pages_for

SECONDS_PER_PROMPT_TOKEN = 5e-5
"""Assumed prefill time of a token until one was measured."""
OVERTAKEN = 8.0
"""Shorter prompts overtake a prompt, even one that has begun, until it has waited for so many times the seconds of the
rest of its own prefill: shortest first with ageing, so that no request waits forever."""


class Scheduler:
    """waiting -> prefilling -> decoding -> finished, and back to waiting by preemption."""

    def __init__(self, pages: PagePool, slots: SlotPool, states: StatePool | None = None, keys_ahead: int = 0) -> None:
        """states: for a model with recurrent state. keys_ahead: as of DecodeRows."""
        self.pages = pages
        self.states = states
        self.slots = slots
        self.waiting: list[ChatSequence] = []
        self.running: dict[int, ChatSequence] = {}
        """Every sequence that holds a slot, by slot, in order of admission."""
        self.rows = DecodeRows(slots.num_slots, pages.page_size, keys_ahead)
        self.num_preemptions = 0
        self._prefilling: list[ChatSequence] = []

    def add(self, sequence: ChatSequence) -> None:
        """Queues a sequence and looks it up in the prefix index."""
        self.waiting.append(sequence)
        self._look_up(sequence)

    def _look_up(self, sequence: ChatSequence) -> None:
        sequence.extend_digests(sequence.num_tokens)
        sequence.hit_pages = sequence.largest_hit(self.pages.match(sequence.digests))
        if self.states is not None:
            self.states.look_up(sequence, self._prefilling)

    def has_work(self) -> bool:
        return bool(self.rows.members) or self.has_prefills()

    def has_prefills(self) -> bool:
        return bool(self._prefilling or self.waiting)

    def never_scheduled(self, *, submitted_before: float) -> list[ChatSequence]:
        return [s for s in self.waiting if s.stats.scheduled is None and s.stats.submitted < submitted_before]

    def has_chunks(self, can_start: Callable[[ChatSequence], bool]) -> bool:
        """Whether a prompt has begun or could begin, given room."""
        return self.prefilling or bool(self.slots.num_free and self._admissible(can_start))

    @property
    def prefilling(self) -> bool:
        """Whether a prompt has begun and is not computed yet."""
        return bool(self._prefilling)

    def schedule(
        self, can_start: Callable[[ChatSequence], bool], budget: ChunkBudget | None, drafts: int = 0
    ) -> Step | None:
        """Chunks of prompts if `budget` affords any, else the decode rows; None when nothing can run now.

        can_start: whether a waiting sequence has what its prefill reads: the encoder outputs of all items behind its
            prefix hit (hit_pages), and its grammar.
        drafts: of each decode row, if none is guided.
        """
        if budget is not None and (chunks := self._chunks(can_start, budget)):
            return Step(sampler_needs(tuple(chunk.sequence for chunk in chunks if chunk.is_last)), tuple(chunks))
        drafts = 0 if self.rows.needs.guided else drafts
        allocations = self._grow(drafts)
        rows = self.rows
        if not rows.members:
            return None
        num_pages = pages_for(int(rows.next_keys(drafts).max()), self.pages.page_size)
        return Step(
            rows.needs,
            slots=rows.slots,
            sequences=rows.sequences,
            num_pages=num_pages,
            allocations=tuple(allocations),
            drafts=drafts,
        )

    def _chunks(self, can_start: Callable[[ChatSequence], bool], budget: ChunkBudget) -> list[Chunk]:
        """Chunks of prompts that have begun or can be admitted, in order of priority: a short prompt that came later
        overtakes the rest of a long one."""
        if self.states is not None:
            budget.align(self.states.rows.page_size)
        chunks, size = list[Chunk](), self.pages.page_size
        filled: set[Digest] = set()  # Of pages that these chunks fill.
        admitting = True
        seconds = OVERTAKEN * (budget.cost.seconds_per_token or SECONDS_PER_PROMPT_TOKEN)
        waiting = (*self._prefilling, *self._admissible(can_start))
        for sequence in sorted(waiting, key=lambda sequence: priority(sequence, seconds)):
            if not sequence.slot:
                if not admitting:
                    continue
                self._look_up(sequence)
                if not can_start(sequence):
                    continue  # Part of its hit was evicted: it needs items that are not encoded any more.
                if self._awaits(sequence, filled):
                    continue
                if not budget.affords(sequence.hit_pages * size) or not self._admit(sequence):
                    admitting = False
                    continue
            start = sequence.num_prefilled
            length = min(budget.affords(start), sequence.remaining_prefill)
            if self.states is not None:
                length = self.states.cut(sequence, start, length)
            if length:
                end = start + length
                budget.spend(length, start)
                filled.update(sequence.digests[start // size : end // size])
                chunks.append(Chunk(sequence, start, end, is_last=end == sequence.num_tokens))
        return chunks if self.states is None else [self.states.with_snapshot(chunk) for chunk in chunks]

    def _awaits(self, sequence: ChatSequence, filled: set[Digest]) -> bool:
        """Whether what the prompt goes on with is being computed for another one."""
        if self.states is not None:
            return self.states.awaited(sequence, self._prefilling)
        hit = sequence.hit_pages
        return hit < sequence.largest_hit(len(sequence.digests)) and sequence.digests[hit] in filled

    def _admissible(self, can_start: Callable[[ChatSequence], bool]) -> list[ChatSequence]:
        """Waiting sequences that lack nothing but a slot and pages."""
        return [sequence for sequence in self.waiting if not sequence.num_unread and can_start(sequence)]

    def _admit(self, sequence: ChatSequence) -> bool:
        """Allocates a slot, and pages for all known tokens and the next one; False if there are too few. Keeps one page
        per decode row free, so that an admission does not cause a preemption at once."""
        if not self.slots.num_free:
            return False
        shared = self.pages.share(sequence.digests[: sequence.hit_pages])
        num_keys = sequence.num_tokens + 1 + self.rows.keys_ahead
        num_keys = min(num_keys, sequence.num_prompt_tokens + sequence.max_new_tokens - 1)
        wanted = pages_for(num_keys, self.pages.page_size) - len(shared)
        if wanted + len(self.rows.members) > self.pages.num_available:
            self.pages.release(shared)
            return False
        sequence.pages = shared + self.pages.allocate(wanted)
        sequence.num_prefilled = len(shared) * self.pages.page_size
        sequence.num_indexed = len(shared)
        if sequence.stats.scheduled is None:
            sequence.cached_tokens = sequence.num_prefilled
        if self.states is not None:
            self.states.admit(sequence)
        sequence.slot = self.slots.allocate()
        self.running[sequence.slot] = sequence
        self.waiting.remove(sequence)
        self._prefilling.append(sequence)
        return True

    def _grow(self, drafts: int) -> list[BlockAllocation]:
        """Allocates pages for the keys of the next step. While many pages are free, every row gets its next page early,
        so that block tables are written in fewer uploads."""
        rows, size = self.rows, self.pages.page_size
        allocations: list[BlockAllocation] = []
        wanted = np.minimum(rows.next_keys(drafts), rows.limit[rows.slots])
        if not (wanted > rows.capacity[rows.slots]).any():
            return allocations
        for sequence, num_keys in zip(rows.sequences, wanted.tolist(), strict=True):
            slot = sequence.slot
            if rows.members.get(slot) is not sequence:
                continue  # It was preempted to make room for an earlier row.
            while num_keys > rows.capacity[slot] and self._make_room(sequence):
                self._add_page(sequence, allocations)
            ahead = min(num_keys - 1 + size, int(rows.limit[slot])) > rows.capacity[slot]
            if sequence.slot and ahead and self.pages.num_available > 2 * len(rows.members):
                self._add_page(sequence, allocations)
        return [allocation for allocation in allocations if allocation.slot in rows.members]

    def _add_page(self, sequence: ChatSequence, allocations: list[BlockAllocation]) -> None:
        (page,) = self.pages.allocate(1)
        allocations.append(BlockAllocation(sequence.slot, len(sequence.pages), page))
        sequence.pages.append(page)
        self.rows.capacity[sequence.slot] += self.pages.page_size

    def _make_room(self, sequence: ChatSequence) -> bool:
        """Preempts sequences, the newest first, until a page is available; False when `sequence` itself was
        preempted."""
        while not self.pages.num_available:
            victims = (
                s for s in reversed(self.running.values()) if s.slot in self.rows.members or s in self._prefilling
            )
            victim = next(victims)
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

    def preempt(self, sequence: ChatSequence) -> None:
        """Moves a sequence back to the waiting queue. Tokens that were launched before are still read."""
        if sequence.slot in self.rows.members:
            launched = sequence.max_new_tokens - int(self.rows.remaining[sequence.slot])
            sequence.num_unread = launched - len(sequence.generated)  # Each unread step counts as one token.
        self._release(sequence)
        self.num_preemptions += 1
        self.add(sequence)

    def launched(self, step: Step) -> None:
        """Records that a step of `schedule` was launched. Every later launch finds the pages that its chunks fill."""
        if len(step.slots):
            self.rows.advance(step.drafts)
        for chunk in step.chunks:
            sequence = chunk.sequence
            sequence.num_prefilled = chunk.end
            self.index(sequence, chunk.end)
            if self.states is not None:
                self.states.launched(chunk)
            if chunk.is_last:
                self._prefilling.remove(sequence)
                self.rows.add(sequence)

    def settle(self, sequence: ChatSequence, drafts: int, accepted: int, *, ended: bool) -> None:
        """Records how many drafts a step that was read accepted; later ones compute nothing for a row that ended.
        DecodeRows.leave comes after the last row."""
        if sequence.slot:
            self.rows.settle(sequence.slot, drafts, accepted)
            if ended or len(sequence.generated) == sequence.max_new_tokens:
                self.rows.num_keys[sequence.slot] = sequence.num_stated + 1

    def index(self, sequence: ChatSequence, num_keys: int) -> None:
        """Puts full pages into the prefix index: launched steps write the keys of the first `num_keys` tokens, which
        are known, to the pages that the sequence has now."""
        full = num_keys // self.pages.page_size
        if not sequence.slot or full <= sequence.num_indexed:
            return
        sequence.extend_digests(full * self.pages.page_size)
        for index in range(sequence.num_indexed, full):
            self.pages.index(sequence.pages[index], sequence.digests[index])
        sequence.num_indexed = full

    def finish(self, sequence: ChatSequence, *, failed: bool = False) -> None:
        """Ends a sequence in any state. The next launch may use its slot and pages, since it runs after all earlier
        ones. failed: nothing that it computed last can be trusted."""
        sequence.finished = True
        if sequence.slot:
            self._release(sequence, failed=failed)
        else:
            self.waiting.remove(sequence)

    def _release(self, sequence: ChatSequence, *, failed: bool = False) -> None:
        self.rows.remove(sequence)
        if sequence in self._prefilling:
            self._prefilling.remove(sequence)
        elif self.states is not None and not failed:
            end = self.states.keep_last(sequence, int(self.rows.num_keys[sequence.slot]))
            self.index(sequence, end)
            last = end // self.pages.page_size - 1
            if end and sequence.digests[last] not in self.pages:  # Another sequence's page had it, and was evicted.
                self.pages.index(sequence.pages[last], sequence.digests[last])
        if self.states is not None:
            self.states.release(sequence)
        del self.running[sequence.slot]
        self.slots.release(sequence.slot)
        self.pages.release(sequence.pages)
        sequence.slot, sequence.pages = 0, []
        sequence.num_prefilled = sequence.num_indexed = 0


def priority(sequence: ChatSequence, seconds: float) -> float:
    """Smaller goes first. seconds: that each prompt token which is still to be computed puts the request back."""
    done = max(sequence.hit_pages * sequence.page_size, sequence.num_prefilled)
    return sequence.request.arrival + seconds * (sequence.num_tokens - done)
