"""One chat request on its way through the engine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from models.media import MediaItem, Prompt
from service.engine.messages import ChatRequest, SamplingParams
from service.engine.sampling_params import needs_full_sampler


@dataclass(frozen=True)
class Rows:
    """`length` positions from `start` that take the rows of item `item` from row `offset` on."""

    item: int
    start: int
    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.start + self.length


@dataclass(eq=False)
class Sequence:
    """Known tokens (prompt and read results) and where their keys are.

    A token is sampled by a step that was launched and read one step later; until then the scheduler's rows alone know
    of it (scheduler.py).
    """

    request: ChatRequest
    max_new_tokens: int
    """The length cap, from the request, the context and the pages there are."""
    page_size: int

    generated: list[int] = field(default_factory=list)
    """Sampled tokens that were read."""
    num_unread: int = 0
    """Tokens that were launched before a preemption and are still on their way."""
    slot: int = 0
    """0 while it has none."""
    pages: list[int] = field(default_factory=list)
    num_prefilled: int = 0
    """Keys that the prefix index gave or prefill chunks wrote (launched)."""
    num_indexed: int = 0
    """Leading pages that the prefix index gave or got."""
    digests: list[bytes] = field(default_factory=list)
    """Of the leading full pages of known tokens."""
    hit_pages: int = 0
    """Leading pages that the prefix index held when it was last asked."""
    cached_tokens: int = 0
    """Prompt positions that the prefix index gave at the first admission."""
    pinned: dict[bytes, int] = field(default_factory=dict)
    """Digests of items whose embeddings the encoder cache holds for it, with the last position that takes a row."""
    first_scheduled: float | None = None
    finished: bool = False

    def __post_init__(self) -> None:
        # Asked for every row of every step.
        self.num_prompt_tokens = len(self.request.prompt.token_ids)
        self.needs_full_sampler = needs_full_sampler(self.request.sampling)

    @property
    def prompt(self) -> Prompt:
        return self.request.prompt

    @property
    def sampling(self) -> SamplingParams:
        return self.request.sampling

    @property
    def num_tokens(self) -> int:
        """Known tokens; a prefill has to compute all of them."""
        return self.num_prompt_tokens + len(self.generated)

    @property
    def remaining_prefill(self) -> int:
        return self.num_tokens - self.num_prefilled

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

    def media_rows(self, start: int = 0, end: int | None = None) -> Iterator[Rows]:
        """The media positions inside [start, end), in prompt order."""
        end = self.num_prompt_tokens if end is None else end
        offsets = [0] * len(self.prompt.items)
        for span in self.prompt.spans:
            first, last = max(start, span.start), min(end, span.start + span.length)
            if first < last:
                yield Rows(span.item, first, offsets[span.item] + first - span.start, last - first)
            offsets[span.item] += span.length

    def items_from(self, start: int) -> dict[int, MediaItem]:
        """Items with a position at or after `start`, by index."""
        return {rows.item: self.prompt.items[rows.item] for rows in self.media_rows(start)}

    def last_position(self, item: int) -> int:
        """The last prompt position whose embedding comes from the item."""
        return max(span.start + span.length for span in self.prompt.spans if span.item == item) - 1

    def extend_digests(self, num_tokens: int) -> None:
        """Digests of all pages full with the first `num_tokens` known tokens.

        A page's digest covers the digest before it, its token ids and positions, and for media positions the item's
        digest and rows: what decides its keys and values.
        """
        size, done = self.page_size, len(self.digests) * self.page_size
        tokens, positions = self.token_ids(done, num_tokens), self.positions(done, num_tokens)
        spans = list(self.media_rows(done, num_tokens)) if self.prompt.items else []
        for start in range(done, num_tokens - size + 1, size):
            page = slice(start - done, start - done + size)
            hasher = hashlib.sha256(self.digests[-1] if self.digests else b"")
            hasher.update(tokens[page].tobytes())
            hasher.update(positions[:, page].tobytes())
            for rows in spans:
                first, last = max(start, rows.start), min(start + size, rows.end)
                if first < last:
                    hasher.update(self.prompt.items[rows.item].digest)
                    hasher.update(np.array((first - start, rows.offset + first - rows.start, last - first)).tobytes())
            self.digests.append(hasher.digest())

    def largest_hit(self, num_pages: int) -> int:
        """How many of `num_pages` matching pages to use: at least one token is computed, and a hit that would end
        inside an item ends before it."""
        num_pages = min(num_pages, (self.num_tokens - 1) // self.page_size)
        starts: dict[int, int] = {}
        ends: dict[int, int] = {}
        for span in self.prompt.spans:
            starts.setdefault(span.item, span.start)
            ends[span.item] = span.start + span.length
        changed = True
        while changed:
            end = num_pages * self.page_size
            cut = [starts[item] // self.page_size for item in starts if starts[item] < end < ends[item]]
            changed = bool(cut)
            num_pages = min([num_pages, *cut])
        return num_pages
