"""What a chat worker keeps about a launch until its results have been read."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from service.engine.chat.encoder import Encoded
from service.engine.chat.guided.guidance import MaskJob, Unread
from service.engine.chat.pacing import ChunkBudget
from service.engine.chat.runner import PendingSampling
from service.engine.chat.sequence import ChatSequence, Chunk
from service.engine.core.readback import Readback


@dataclass(eq=False)
class Launch:
    """A step or an encoder pass whose results have not been read."""

    kind: str
    """StepKind of a step, or "encoder"."""
    size: int
    """Decode rows, tokens of chunks or patches of an encoder pass."""
    route: str
    launched_at: float
    """On the worker's clock."""
    predicted: float
    """Seconds that it was predicted to take."""
    host_seconds: float = 0.0
    """Time that Python spent on it so far."""
    readback: Readback | None = None
    """None while the step is held."""
    sequences: tuple[ChatSequence, ...] = ()
    """Sequences of the rows of the results: decode rows, or prompts whose last chunks these are."""
    drafts: int = 0
    """Of each row; the results then have 1 + drafts rows for each of `sequences`."""
    chunks: tuple[Chunk, ...] = ()
    budget: ChunkBudget | None = None
    """What its chunks spent, if there are any."""
    encoded: Encoded | None = None
    """Set for an encoder pass."""
    pending_sampling: PendingSampling | None = None
    """Set while the step is held: until its sampling is launched."""
    masks: MaskJob | None = None
    """The masks that a held step waits for."""
    timing_valid: bool = True
    """False if its duration says nothing about its cost: for a held step with an encoder pass between its layers and
    its sampling, and behind a launch of another model."""

    @property
    def rows(self) -> int:
        """Number of sequences that it computes for: decode rows or chunks."""
        return len(self.sequences) + sum(not chunk.is_last for chunk in self.chunks)

    @property
    def arrived(self) -> bool:
        return self.readback is not None and self.readback.ready()

    def wait(self) -> None:
        """Blocks until its results, or the masks of a held step, have arrived."""
        if self.readback is not None:
            self.readback.wait()
        elif self.masks is not None:
            self.masks.wait()


class InFlight:
    """Launches in the order in which their results arrive."""

    def __init__(self) -> None:
        self._launches: deque[Launch] = deque()
        self._last_read_at = -math.inf
        self._behind_others = False
        """Whether another model launched after the last step or pass here."""

    def __len__(self) -> int:
        return len(self._launches)

    def __getitem__(self, index: int) -> Launch:
        return self._launches[index]

    @property
    def held(self) -> Launch | None:
        """The step whose sampling waits for masks: always the last one."""
        last = self._launches[-1] if self._launches else None
        return last if last is not None and last.pending_sampling is not None else None

    def unread(self, sequences: Sequence[ChatSequence]) -> list[Unread]:
        """Where tokens of these sequences that were launched but not read yet will arrive. When a step is launched, at
        most one other has not been read."""
        launch = next((launch for launch in self._launches if launch.readback and launch.sequences), None)
        if launch is None or launch.readback is None:
            return [()] * len(sequences)
        rows = {sequence: row for row, sequence in enumerate(launch.sequences)}
        return [((launch.readback, rows[one]),) if one in rows else () for one in sequences]

    def holds(self, readbacks: Sequence[Readback]) -> bool:
        """Whether the results of a launch with one of these have not been read."""
        return any(launch.readback is readback for launch in self._launches for readback in readbacks)

    def add(self, launch: Launch) -> None:
        """Adds a step, or an encoder pass, whose results arrive before those of a held step."""
        launch.timing_valid, self._behind_others = not self._behind_others, False
        if (held := self.held) is None:
            self._launches.append(launch)
        else:
            held.timing_valid = False
            self._launches.insert(len(self._launches) - 1, launch)

    def others_launched(self) -> None:
        """Another model launched: behind the last step here, or between the layers of a held one and its sampling."""
        self._behind_others = True
        if (held := self.held) is not None:
            held.timing_valid = False

    def pop(self, now: float) -> tuple[Launch, float]:
        """Removes the oldest launch, which has arrived. Returns it with its seconds: since it was launched, or since
        the previous one was read, if that was later."""
        launch, before = self._launches.popleft(), self._last_read_at
        self._last_read_at = now
        return launch, now - max(launch.launched_at, before)

    def backlog(self, now: float) -> float:
        """Predicted seconds until the launches have finished."""
        if not self._launches:
            return 0.0
        started = max(self._launches[0].launched_at, self._last_read_at)
        return max(0.0, sum(launch.predicted for launch in self._launches) - (now - started))

    def wait(self) -> None:
        """Waits for the oldest results. With a held step: for the tokens that its masks depend on or, once these are
        there, for the masks, but only for a while."""
        (self.held or self._launches[0]).wait()
