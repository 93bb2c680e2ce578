"""How a request was computed: counted while it runs, reported with its answer."""

from __future__ import annotations

from dataclasses import dataclass

from service.graphs.observations import Observations
from service.link.messages import PhaseTimes, StepCounts


@dataclass(eq=False)
class RequestStats:
    """Counts and times of one request. `counts` is sent with its last delta, `times` with its first. Times are on the
    worker's clock."""

    submitted: float = 0.0
    """When the engine got it: reading and decoding the request took from its arrival until then."""
    steps: int = 0
    """Steps that included it."""
    replayed: int = 0
    """How many of them were replayed."""
    rows: int = 0
    """Rows of all of them, those of other requests included."""
    drafted: int = 0
    accepted: int = 0
    """Drafts of its tokens, and how many of them were accepted."""
    encoded_media: int = 0
    """Its pictures and videos that had to be encoded."""
    scheduled: float | None = None
    """Launch of its first step."""
    encoder: tuple[float, float] | None = None
    """Start of the first encoder pass with one of its items, and end of the last one."""

    def start(self, now: float, observations: Observations, *, model: str, positions: int, cached: int) -> None:
        """Records the launch of its first step. cached: positions of its prompt found in the prefix cache."""
        self.scheduled = now
        observations.observe("queue_duration_seconds", now - self.submitted, model=model)
        observations.count("prefix_cache_query_tokens_total", positions, model=model)
        observations.count("prefix_cache_hit_tokens_total", cached, model=model)

    def add(self, replayed: bool, rows: int) -> None:
        """Records a step with `rows` rows that included the request."""
        self.steps += 1
        self.replayed += replayed
        self.rows += rows

    def add_encoder_pass(self, start: float, end: float) -> None:
        self.encoder = (start if self.encoder is None else self.encoder[0], end)

    def counts(self) -> StepCounts:
        return StepCounts(self.steps, self.replayed, self.rows, self.encoded_media, self.drafted, self.accepted)

    def times(self, computed: float) -> PhaseTimes | None:
        """computed: when the first token or audio was read. None before the first step."""
        return None if self.scheduled is None else PhaseTimes(self.scheduled, computed, self.encoder)
