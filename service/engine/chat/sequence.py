"""Chat requests on their way through the engine, and the steps that the scheduler decides and the runner launches."""

from __future__ import annotations

import hashlib
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from models.interfaces.media import MediaItem, Prompt
from service.engine.core.request_stats import RequestStats
from service.link.messages import ChatDelta, ChatRequest, PhaseTimes, TokenInfo
from service.link.sampling import SamplingParams


class Guide:
    """The state of a matcher that a mask server has.

    number: by which the server knows it. server: index of that server.
    """

    def __init__(self, number: int, server: int) -> None:
        self.number = number
        self.server = server
        self.built = False
        """Whether the matcher was built, or failed: see `problem`."""
        self.problem = ""
        """Why there are no masks; empty if there are."""
        self.begun = time.monotonic()
        """When building the matcher was requested."""
        self.ended = False
        """Whether the answer needs no more masks."""
        self.num_consumed = 0
        """Tokens of the answer that were sent to the matcher."""

    @property
    def seconds(self) -> float:
        """Seconds since building the matcher was requested."""
        return time.monotonic() - self.begun


_MEDIA = struct.Struct("<qqq")
"""The first position of a page with rows of an item, the first of the rows, and their number."""


@dataclass(frozen=True)
class MediaRows:
    """`length` positions from `start` that take the rows of item `item` from row `offset` on."""

    item: int
    start: int
    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(eq=False)
class ChatSequence:
    """The known tokens of a request (its prompt, and the sampled tokens that were read), and where their keys are.

    A sampled token is read one step after its launch. Until then only the scheduler's DecodeRows count it.
    """

    request: ChatRequest
    max_new_tokens: int
    """The length cap, from the request, the context and the number of pages."""
    page_size: int

    generated: list[int] = field(default_factory=list)
    """Sampled tokens that were read."""
    num_unread: int = 0
    """Tokens that were launched before a preemption and have not been read."""
    slot: int = 0
    """0 while it has none."""
    pages: list[int] = field(default_factory=list)
    num_prefilled: int = 0
    """Positions whose keys are in shared pages or are written by launched prefill chunks."""
    num_indexed: int = 0
    """Leading pages that are in the prefix index, or get into it when the step that fills them is launched."""
    digests: list[bytes] = field(default_factory=list)
    """Digests of the leading full pages of known tokens."""
    hit_pages: int = 0
    """Leading pages found at the last lookup in the prefix index."""
    cached_tokens: int = 0
    """Prompt positions found in shared pages at the first admission."""
    state_rows: list[int] = field(default_factory=list)
    """Of models with recurrent state, its two rows: the first holds the state of `num_prefilled` positions, the next
    chunk writes the second. Decode steps swap them on the device (service.engine.chat.states)."""
    state_read: int = 0
    """The row that the next chunk reads: its first one, a snapshot, or 0 for none."""
    num_stated: int = 0
    """With drafts, tokens of which a step that was read kept the state."""
    snapshot_row: int = 0
    """The row of the snapshot that the scheduled chunk writes; 0: none."""
    snapshot_ends: list[int] = field(default_factory=list)
    """Positions of which its prefill leaves a snapshot, ascending."""
    pinned: dict[bytes, int] = field(default_factory=dict)
    """Digests of items pinned for it in the encoder cache, with the last prompt position that needs each."""
    guide: Guide | None = None
    """The grammar of its answer. It follows `generated`, so a preemption does not affect it."""
    stats: RequestStats = field(default_factory=RequestStats)
    finished: bool = False

    def __post_init__(self) -> None:
        # Computed once: every step reads these for every row.
        self.request_id = self.request.request_id
        self.num_prompt_tokens = len(self.request.prompt.token_ids)
        self.needs_penalties_or_filters = self.request.sampling.needs_penalties_or_filters
        marks = self.prompt.marks
        self.classes = None if marks is None else np.zeros(len(marks), dtype=np.int32)
        """The most likely class of each mark that was read."""
        self._items: tuple[int, Mapping[int, MediaItem]] = (-1, {})

    @property
    def prompt(self) -> Prompt:
        return self.request.prompt

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def has_guide(self) -> bool:
        """Whether its grammar, if it has one, has been built."""
        return self.guide is None or self.guide.built

    @property
    def num_tokens(self) -> int:
        """Known tokens; a prefill has to compute all of them."""
        return self.num_prompt_tokens + len(self.generated)

    @property
    def remaining_prefill(self) -> int:
        """Known tokens whose keys no launched step writes."""
        return self.num_tokens - self.num_prefilled

    def delta(
        self,
        tokens: tuple[int, ...],
        infos: tuple[TokenInfo, ...] = (),
        reason: str | None = None,
        times: PhaseTimes | None = None,
        hidden: np.ndarray | None = None,
    ) -> ChatDelta:
        """New tokens for the client; with a `reason` (finish_reason), the last ones. Those with drafts may be the last
        without one, too, by a stop string."""
        last = reason is not None
        steps = self.stats.counts() if last or self.stats.drafted else None
        classes = self.classes if last else None
        return ChatDelta(self.request_id, tokens, infos, reason, self.cached_tokens, steps, times, hidden, classes)

    def token_ids(self, start: int, end: int) -> np.ndarray:
        """Known tokens [start, end), int64."""
        prompt = self.prompt.token_ids[start:end].astype(np.int64)
        rest = self.generated[max(0, start - self.num_prompt_tokens) : max(0, end - self.num_prompt_tokens)]
        return np.concatenate((prompt, np.asarray(rest, dtype=np.int64))) if rest else prompt

    def positions(self, start: int, end: int) -> np.ndarray:
        """Rotary positions int64 [axes, end - start]."""
        prompt = self.prompt.positions[:, start:end].astype(np.int64)
        first = max(start, self.num_prompt_tokens)
        if end <= first:
            return prompt
        rest = self.prompt.next_position - self.num_prompt_tokens + np.arange(first, end)
        return np.concatenate((prompt, np.broadcast_to(rest, (prompt.shape[0], len(rest)))), axis=1)

    def media_rows(self, start: int, end: int | None = None) -> Iterator[MediaRows]:
        """The media positions inside [start, end), in prompt order."""
        end = self.num_prompt_tokens if end is None else end
        offsets = [0] * len(self.prompt.items)
        for run in self.prompt.placeholders:
            first, last = max(start, run.start), min(end, run.start + run.length)
            if first < last:
                yield MediaRows(run.item, first, offsets[run.item] + first - run.start, last - first)
            offsets[run.item] += run.length

    def marks(self, start: int, end: int) -> slice:
        """Which of the prompt's marks are inside [start, end)."""
        marks = self.prompt.marks
        return slice(0) if marks is None else slice(*np.searchsorted(marks, (start, end)).tolist())

    def items_from(self, start: int) -> Mapping[int, MediaItem]:
        """Items with a position at or after `start`, by index. The result is kept, since every launch asks for it for
        every waiting sequence, and `start`, the end of the prefix hit, seldom changes."""
        if self._items[0] != start:
            self._items = start, {rows.item: self.prompt.items[rows.item] for rows in self.media_rows(start)}
        return self._items[1]

    def last_position(self, item: int) -> int:
        """The last prompt position whose embedding comes from the item."""
        return max(run.start + run.length for run in self.prompt.placeholders if run.item == item) - 1

    def extend_digests(self, num_tokens: int) -> None:
        """Computes the digests of all pages that the first `num_tokens` known tokens fill.

        A digest covers everything that determines a page's keys and values: the digest of the page before (of the first
        page: the prompt's salt), the token ids, the positions, and for media the item's digest and rows.
        """
        size, done = self.page_size, len(self.digests) * self.page_size
        count = (num_tokens - done) // size
        if count < 1:
            return
        end = done + count * size
        known = np.concatenate((self.token_ids(done, end)[None], self.positions(done, end)))
        content = known.reshape(-1, count, size).swapaxes(0, 1).tobytes()
        width = len(content) // count
        media = list(self.media_rows(done, end)) if self.prompt.items else []
        digest = self.digests[-1] if self.digests else self.prompt.cache_salt
        for page in range(count):
            parts = [digest, content[page * width : (page + 1) * width]]
            start = done + page * size
            for rows in media:
                first, last = max(start, rows.start), min(start + size, rows.end)
                if first < last:
                    parts += [self.prompt.items[rows.item].digest]
                    parts += [_MEDIA.pack(first - start, rows.offset + first - rows.start, last - first)]
            digest = hashlib.sha256(b"".join(parts)).digest()
            self.digests.append(digest)

    def largest_hit(self, num_pages: int) -> int:
        """How many of `num_pages` matching pages to use, so that at least one token is left to compute, and every mark.
        A hit may end inside an item; the next chunk reads the rest of its rows."""
        marks = self.prompt.marks
        first = self.num_tokens - 1 if marks is None or not len(marks) else int(marks[0])
        return min(num_pages, first // self.page_size)


@dataclass
class DecodeRows:
    """The sequences that decode. Their counters are arrays int64 [num_slots + 1] by request slot, so that a step
    without changes needs no loop over rows.

    num_keys: positions whose keys launched steps have written; all drafts count until their step has been read.
    capacity: positions that the allocated pages hold.
    limit: positions that the longest answer fills.
    remaining: tokens that may still be launched; of drafts only those count that are known to be accepted.
    slots, sequences, needs: those of a Step. A change replaces them, since launched steps still hold the old ones.
    """

    num_slots: int
    page_size: int
    keys_ahead: int = 0
    """Positions behind the keys of a step to which its drafter writes."""
    members: dict[int, ChatSequence] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.num_keys = np.zeros(self.num_slots + 1, dtype=np.int64)
        self.capacity = np.zeros(self.num_slots + 1, dtype=np.int64)
        self.limit = np.zeros(self.num_slots + 1, dtype=np.int64)
        self.remaining = np.zeros(self.num_slots + 1, dtype=np.int64)
        self._refresh()

    def _refresh(self) -> None:
        self.slots = np.fromiter(self.members, dtype=np.int64, count=len(self.members))
        self.sequences = tuple(self.members.values())
        self.needs = sampler_needs(self.sequences)

    def add(self, sequence: ChatSequence) -> None:
        """Adds a sequence whose prefill was launched; its first token has not been read yet."""
        slot = sequence.slot
        self.num_keys[slot] = sequence.num_tokens
        self.capacity[slot] = len(sequence.pages) * self.page_size
        self.limit[slot] = sequence.num_prompt_tokens + sequence.max_new_tokens - 1
        self.remaining[slot] = sequence.max_new_tokens - len(sequence.generated) - 1
        if self.remaining[slot]:
            self.members[slot] = sequence
            self._refresh()

    def remove(self, sequence: ChatSequence) -> None:
        if self.members.pop(sequence.slot, None) is not None:
            self._refresh()

    def next_keys(self, drafts: int) -> np.ndarray:
        """Positions of each row that a step with so many drafts may read or write, int64 [rows]; those behind the limit
        need no page."""
        return np.minimum(self.num_keys[self.slots], self.limit[self.slots]) + 1 + drafts + self.keys_ahead

    def advance(self, drafts: int) -> None:
        """One step was launched; rows that reach their length cap leave."""
        self.num_keys[self.slots] += 1 + drafts
        self.remaining[self.slots] -= 1
        self.leave()

    def settle(self, slot: int, drafts: int, accepted: int) -> None:
        """A step with drafts was read. Call `leave` after the last row."""
        self.num_keys[slot] -= drafts - accepted
        self.remaining[slot] -= accepted

    def leave(self) -> None:
        """Rows that have reached their length cap leave."""
        if (self.remaining[self.slots] <= 0).any():
            self.members = {slot: sequence for slot, sequence in self.members.items() if self.remaining[slot] > 0}
            self._refresh()


@dataclass(frozen=True)
class Chunk:
    """Known tokens [start, end) of a sequence, to be computed in one step. After the last chunk a token is sampled."""

    sequence: ChatSequence
    start: int
    end: int
    is_last: bool
    snapshot_end: int = 0
    """Position of which the chunk leaves a snapshot of the state, in ChatSequence.snapshot_row; 0: none."""

    @property
    def length(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class BlockAllocation:
    """Page `page` becomes entry `index` of the slot's block table."""

    slot: int
    index: int
    page: int


class SamplerNeeds(NamedTuple):
    """What the sampling of a step's rows needs."""

    full: bool
    """Whether any row has penalties or filters."""
    logprobs: int | None
    """The largest number of alternatives that a row has to report; None if no row reports log probabilities."""
    guided: bool
    """Whether any row has a grammar, and so needs a mask."""
    hidden: bool = False
    """Whether rows report their hidden vectors: all of an embedding model, whose requests end with their prefill."""


@dataclass(frozen=True, eq=False)
class Step:
    """One batch: the decode rows, or chunks of prompts."""

    needs: SamplerNeeds
    chunks: tuple[Chunk, ...] = ()
    slots: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """Request slots of the decode rows, int64 [rows]."""
    sequences: tuple[ChatSequence, ...] = ()
    """Sequences of the decode rows, in the order of `slots`."""
    num_pages: int = 0
    """Block table entries that the longest decode row uses."""
    allocations: tuple[BlockAllocation, ...] = ()
    """Pages that decode rows got for this step; their block tables are written before it runs."""
    drafts: int = 0
    """Drafts of each decode row; none where a row is guided."""

    @property
    def sampled(self) -> tuple[ChatSequence, ...]:
        """The sequences that get a token, in the order of the results."""
        return self.sequences or tuple(chunk.sequence for chunk in self.chunks if chunk.is_last)


def sampler_needs(sequences: tuple[ChatSequence, ...]) -> SamplerNeeds:
    asked = [s.sampling.logprobs for s in sequences if s.sampling.logprobs is not None]
    return SamplerNeeds(
        full=any(s.needs_penalties_or_filters for s in sequences),
        logprobs=max(asked, default=None),
        guided=any(s.guide is not None for s in sequences),
        hidden=any(s.sampling.hidden for s in sequences),
    )
