"""What the scheduler decides and the runner launches: a step with its decode rows and prefill chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from service.engine.chat.sequence import ChatSequence


@dataclass(frozen=True)
class Chunk:
    """Known tokens [start, end) of a sequence, to be computed in one step. After the last chunk a token is sampled."""

    sequence: ChatSequence
    start: int
    end: int
    is_last: bool

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


@dataclass(frozen=True, eq=False)
class Step:
    """One batch: decode rows first, then prefill chunks."""

    slots: np.ndarray
    """Request slots of the decode rows, int64 [rows]."""
    sequences: tuple[ChatSequence, ...]
    """Sequences of the decode rows, in the order of `slots`."""
    num_pages: int
    """Block table entries that the longest decode row uses."""
    chunks: tuple[Chunk, ...]
    allocations: tuple[BlockAllocation, ...]
    """Pages that decode rows got for this step; their block tables are written before it runs."""
    needs: SamplerNeeds

    @property
    def sampled(self) -> tuple[ChatSequence, ...]:
        """The sequences that get a token, in the order of the results."""
        if not self.chunks:
            return self.sequences
        return (*self.sequences, *(chunk.sequence for chunk in self.chunks if chunk.is_last))


def sampler_needs(sequences: tuple[ChatSequence, ...]) -> SamplerNeeds:
    asked = [s.sampling.logprobs for s in sequences if s.sampling.logprobs is not None]
    return SamplerNeeds(
        full=any(s.needs_penalties_or_filters for s in sequences),
        logprobs=max(asked, default=None),
        guided=any(s.guide is not None for s in sequences),
    )
