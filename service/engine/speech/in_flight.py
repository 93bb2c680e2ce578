"""Launches of a speech model whose results have not been read, and when the next one may be chosen."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from service.engine.core.readback import Mark, Readback
from service.engine.speech.forecast import Kind
from service.engine.speech.sequence import SpeechSequence

MAX_IN_FLIGHT = 2
"""Launches with results that may be in flight. One without may be beside them: a prefill whose first patches are rows
of the next step."""
LEAD = 0.004
"""The next step is chosen this many seconds before the running one ends, so that it includes late arrivals."""
_WEIGHT = 0.1
"""Weight of a measurement in the running mean of a row's seconds."""


@dataclass(frozen=True, eq=False)
class Timing:
    """A timed part of a launch, under the key of its cost, with marks at begin and end."""

    kind: Kind
    solver_steps: int
    size: int
    start: Mark
    end: Mark


@dataclass(eq=False)
class Launch:
    """A step, or the encoding of a piece of reference audio, whose results have not been read."""

    rows: list[tuple[SpeechSequence, int]]
    """Sequence and segment of every row, in the order of the copied arrays."""
    readback: Readback
    kind: str
    route: str
    timings: list[Timing] = field(default_factory=list)
    launched_at: float = 0.0
    """On the worker's clock, as InFlight.add was told."""
    predicted: float = 0.0
    """Seconds that it was predicted to take, as InFlight.add was told."""
    prompts: Sequence[SpeechSequence] = ()
    """Sequences of which it computes a part of the prompt, or all of it without a first patch: those have no row."""
    reference_id: str | None = None
    """The EncodeReference request that this launch completes."""


class InFlight:
    """Launches in order. While a step's results are read, nothing is launched: with many rows that takes longer than a
    prefill, so a step behind one is chosen before them."""

    def __init__(self, clock: Callable[[], float], *, on_gpu: bool) -> None:
        self._clock = clock
        self._on_gpu = on_gpu
        self._launches: deque[Launch] = deque()
        self.free_at = -math.inf
        """When the GPU is predicted to be free for the next step."""
        self._reading: tuple[float, int] | None = None
        """When results were last begun to be read, and of how many rows."""
        self._row_seconds = 0.0
        """Running mean of what a row's results take to be read and sent."""

    def __len__(self) -> int:
        return len(self._launches)

    @property
    def oldest(self) -> Launch:
        return self._launches[0]

    @property
    def has_room(self) -> bool:
        return len(self) <= MAX_IN_FLIGHT and sum(bool(launch.rows) for launch in self._launches) < MAX_IN_FLIGHT

    def backlog(self, now: float) -> float:
        """Seconds of work that the GPU has."""
        return max(0.0, self.free_at - now) if self._launches else 0.0

    def near_end(self, now: float) -> bool:
        """Whether the GPU needs the next step soon."""
        return not (self._launches and self._on_gpu and self.backlog(now) > self._lead)

    @property
    def _lead(self) -> float:
        return LEAD + (self._row_seconds * len(self.oldest.rows) if len(self) > 1 else 0.0)

    def add(self, launch: Launch, now: float, predicted: float) -> None:
        """Adds what was launched now, and is predicted to take this many seconds."""
        launch.launched_at, launch.predicted = now, predicted
        self._launches.append(launch)
        self.free_at = max(now, self.free_at) + predicted if self._on_gpu else self._clock()

    def pop(self, now: float) -> Launch | None:
        """The oldest launch, no longer in flight, if its results have arrived."""
        if not (self._launches and self.oldest.readback.ready()):
            return None
        launch = self._launches.popleft()
        if launch.rows:
            self._reading = now, len(launch.rows)
        self.free_at = min(self.free_at, now + sum(other.predicted for other in self._launches))
        return launch

    def note_read(self, now: float) -> None:
        """Records that what `pop` returned has been read and sent."""
        if self._reading is None:
            return
        began, rows = self._reading
        self._row_seconds += _WEIGHT * ((now - began) / rows - self._row_seconds)
        self._reading = None
