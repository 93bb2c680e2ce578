"""What runs next: continuous batching with chunked prefill over pages and slots.

A step advances every decode row by one token and gives the rest of its token budget to prefill chunks. Pages for the
prompt are taken at admission, pages for new tokens as they come; when none is left the newest sequence goes back to
waiting and is computed again later.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from service.engine.pages import PagePool
from service.engine.sequence import Sequence
from service.engine.slots import SlotPool

SECONDS_PER_PROMPT_TOKEN = 5e-5
"""A waiting request counts as this much later per token it has to compute: short ones overtake long ones that came
at about the same time, and nobody waits for ever."""


@dataclass(frozen=True)
class Chunk:
    """Known tokens [start, end) of a sequence to be computed in one step; the last chunk ends in a sampled token."""

    sequence: Sequence
    start: int
    end: int
    is_last: bool

    @property
    def length(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Grant:
    """Page `page` becomes entry `index` of the slot's block table."""

    slot: int
    index: int
    page: int


@dataclass(frozen=True, eq=False)
class Step:
    """One batch. Decode rows first (slots int64 [rows] and their sequences), then prefill chunks.

    num_pages: block table entries that the longest decode row uses. full: a row needs the full sampler; logprobs: the
    most alternatives that a row wants reported, None when none wants any.
    """

    slots: np.ndarray
    sequences: tuple[Sequence, ...]
    num_pages: int
    chunks: tuple[Chunk, ...]
    grants: tuple[Grant, ...]
    full: bool
    logprobs: int | None


@dataclass
class DecodeRows:
    """The sequences that advance by one token a step, as arrays indexed by slot, so that a steady step does no work
    per row: keys launched, positions that the pages hold, tokens that may still be launched."""

    num_slots: int
    page_size: int
    members: dict[int, Sequence] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.keys = np.zeros(self.num_slots + 1, dtype=np.int64)
        self.room = np.zeros(self.num_slots + 1, dtype=np.int64)
        self.left = np.zeros(self.num_slots + 1, dtype=np.int64)
        self._refresh()

    def _refresh(self) -> None:
        self.slots = np.fromiter(self.members, dtype=np.int64, count=len(self.members))
        self.sequences = tuple(self.members.values())
        self.full, self.logprobs = sampler_needs(self.sequences)

    def add(self, sequence: Sequence) -> None:
        """A sequence whose prefill was launched: its first token is on the way."""
        slot = sequence.slot
        self.keys[slot] = sequence.num_tokens
        self.room[slot] = len(sequence.pages) * self.page_size
        self.left[slot] = sequence.max_new_tokens - len(sequence.generated) - 1
        if self.left[slot]:
            self.members[slot] = sequence
            self._refresh()

    def remove(self, sequence: Sequence) -> None:
        if self.members.pop(sequence.slot, None) is not None:
            self._refresh()

    def advance(self) -> None:
        """One step was launched; rows at their length cap launch no more."""
        self.keys[self.slots] += 1
        self.left[self.slots] -= 1
        if not self.left[self.slots].all():
            self.members = {slot: sequence for slot, sequence in self.members.items() if self.left[slot]}
            self._refresh()


class Scheduler:
    """waiting -> prefilling -> decoding -> finished, and back to waiting by preemption."""

    def __init__(self, pages: PagePool, slots: SlotPool, max_step_tokens: int) -> None:
        self.pages = pages
        self.slots = slots
        self.waiting: list[Sequence] = []
        self.running: dict[int, Sequence] = {}
        """Everything that holds a slot, in order of admission."""
        self.rows = DecodeRows(slots.num_slots, pages.page_size)
        self.num_preemptions = 0
        self._prefilling: list[Sequence] = []
        self._max_step_tokens = max_step_tokens

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence and asks the prefix index what it would find."""
        self.waiting.append(sequence)
        self._look_up(sequence)

    def _look_up(self, sequence: Sequence) -> None:
        sequence.extend_digests(sequence.num_tokens)
        sequence.hit_pages = sequence.largest_hit(self.pages.match(sequence.digests))

    def has_work(self) -> bool:
        return bool(self.rows.members) or self.has_prefills()

    def has_prefills(self) -> bool:
        return bool(self._prefilling or self.waiting)

    def schedule(self, has_embeddings: Callable[[Sequence], bool], max_prefill_tokens: int) -> Step | None:
        """The next batch, with at most `max_prefill_tokens` in chunks; None when nothing can run now.

        has_embeddings: every item of a waiting sequence past its hit (hit_pages) is in the encoder cache.
        """
        grants = self._grow()
        budget = min(max_prefill_tokens, self._max_step_tokens - len(self.rows.slots))
        chunks: list[Chunk] = []
        for sequence in self._prefilling:
            budget -= self._add_chunk(chunks, sequence, budget)
        if budget > 0 and self.waiting:
            for sequence in self._admissible(has_embeddings):
                self._look_up(sequence)
                if not has_embeddings(sequence):
                    continue  # Part of its hit was evicted, so it waits for its encoder again.
                if budget <= 0 or not self._admit(sequence):
                    break
                budget -= self._add_chunk(chunks, sequence, budget)
        rows = self.rows
        if not chunks and not len(rows.slots):
            return None
        num_pages = int(rows.keys[rows.slots].max()) // self.pages.page_size + 1 if len(rows.slots) else 0
        full, logprobs = rows.full, rows.logprobs
        if chunks:
            ends = (chunk.sequence for chunk in chunks if chunk.is_last)
            full, logprobs = sampler_needs((*rows.sequences, *ends))
        return Step(rows.slots, rows.sequences, num_pages, tuple(chunks), tuple(grants), full, logprobs)

    def _add_chunk(self, chunks: list[Chunk], sequence: Sequence, budget: int) -> int:
        length = min(budget, sequence.remaining_prefill)
        if length > 0:
            start, end = sequence.num_prefilled, sequence.num_prefilled + length
            chunks.append(Chunk(sequence, start, end, is_last=end == sequence.num_tokens))
        return max(0, length)

    def _admissible(self, has_embeddings: Callable[[Sequence], bool]) -> list[Sequence]:
        """Waiting sequences that only lack a slot and pages, in order."""
        ready = [sequence for sequence in self.waiting if not sequence.num_unread and has_embeddings(sequence)]
        return sorted(ready, key=priority)

    def _admit(self, sequence: Sequence) -> bool:
        """Takes slot and pages for all known tokens and the next. Keeps a page per decode row free, so that an
        admission does not cause a preemption at once."""
        if not self.slots.num_free:
            return False
        hit = self.pages.share(sequence.digests[: sequence.hit_pages])
        num_keys = min(sequence.num_tokens + 1, sequence.num_prompt_tokens + sequence.max_new_tokens - 1)
        wanted = -(-num_keys // self.pages.page_size) - len(hit)
        if wanted + len(self.rows.members) > self.pages.num_available:
            self.pages.release(hit)
            return False
        sequence.pages = hit + self.pages.allocate(wanted)
        sequence.num_prefilled = len(hit) * self.pages.page_size
        sequence.num_indexed = len(hit)
        if sequence.first_scheduled is None:
            sequence.cached_tokens = sequence.num_prefilled
        sequence.slot = self.slots.take()
        self.running[sequence.slot] = sequence
        self.waiting.remove(sequence)
        self._prefilling.append(sequence)
        return True

    def _grow(self) -> list[Grant]:
        """Pages for the keys of the next step. While pages are plenty every row gets one ahead, so that tables are
        written once per page and not once per row."""
        rows, size = self.rows, self.pages.page_size
        grants: list[Grant] = []
        if not (rows.keys[rows.slots] >= rows.room[rows.slots]).any():
            return grants
        for sequence in rows.sequences:
            slot = sequence.slot
            if slot not in rows.members or rows.members[slot] is not sequence:
                continue  # Preempted for the sake of a row before it.
            ahead = rows.keys[slot] + min(size, rows.left[slot]) > rows.room[slot]
            needed = rows.keys[slot] >= rows.room[slot]
            if needed and not self._make_room(sequence):
                continue
            if needed or (ahead and self.pages.num_available > 2 * len(rows.members)):
                (page,) = self.pages.allocate(1)
                grants.append(Grant(slot, len(sequence.pages), page))
                sequence.pages.append(page)
                rows.room[slot] += size
        return [grant for grant in grants if grant.slot in rows.members]

    def _make_room(self, sequence: Sequence) -> bool:
        """Preempts until a page is available; False when `sequence` itself had to go."""
        while not self.pages.num_available:
            victims = (
                s for s in reversed(self.running.values()) if s.slot in self.rows.members or s in self._prefilling
            )
            victim = next(victims)
            self.preempt(victim)
            if victim is sequence:
                return False
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Back to waiting; what is on its way is still read."""
        if sequence.slot in self.rows.members:
            launched = sequence.max_new_tokens - int(self.rows.left[sequence.slot])
            sequence.num_unread = launched - len(sequence.generated)
        self._leave(sequence)
        self.num_preemptions += 1
        self.add(sequence)

    def launched(self, step: Step) -> None:
        """Notes that a step of `schedule` was launched."""
        self.rows.advance()
        for chunk in step.chunks:
            sequence = chunk.sequence
            sequence.num_prefilled = chunk.end
            if chunk.is_last:
                self._prefilling.remove(sequence)
                self.rows.add(sequence)

    def computed(self, sequence: Sequence, num_keys: int) -> None:
        """The first `num_keys` known tokens have keys that were read back as done: full pages become findable."""
        full = num_keys // self.pages.page_size
        if not sequence.slot or full <= sequence.num_indexed:
            return
        sequence.extend_digests(full * self.pages.page_size)
        for index in range(sequence.num_indexed, full):
            self.pages.index(sequence.pages[index], sequence.digests[index])
        sequence.num_indexed = full

    def finish(self, sequence: Sequence) -> None:
        """Ends a sequence wherever it is; its slot and pages are free for the next launch, which runs after
        everything that was launched before."""
        sequence.finished = True
        if sequence.slot:
            self._leave(sequence)
        else:
            self.waiting.remove(sequence)

    def _leave(self, sequence: Sequence) -> None:
        self.rows.remove(sequence)
        if sequence in self._prefilling:
            self._prefilling.remove(sequence)
        del self.running[sequence.slot]
        self.slots.give_back(sequence.slot)
        self.pages.release(sequence.pages)
        sequence.slot, sequence.pages = 0, []
        sequence.num_prefilled = sequence.num_indexed = 0


def sampler_needs(sequences: tuple[Sequence, ...]) -> tuple[bool, int | None]:
    """Whether any of them needs the full sampler, and the most alternatives that any wants reported."""
    asked = [s.sampling.logprobs for s in sequences if s.sampling.logprobs is not None]
    return any(s.needs_full_sampler for s in sequences), max(asked, default=None)


def priority(sequence: Sequence) -> float:
    """Smaller goes first."""
    hit = sequence.hit_pages * sequence.page_size
    return sequence.request.arrival + SECONDS_PER_PROMPT_TOKEN * (sequence.num_tokens - hit)
