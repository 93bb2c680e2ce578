"""The scheduler's view of one speech request: its progress, and that of its listener."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from models.interfaces.capturable import Bucket
from service.engine.core.pages import Digest


@dataclass(frozen=True)
class PrefillChunk:
    """Prompt positions [start, start + length) of a stream's current segment."""

    stream: Stream
    start: int
    length: int
    audio: int
    """How many of them hold patches, at most."""
    is_last: bool
    """Whether they end the prompt, so that its first patch follows."""

    @staticmethod
    def next(stream: Stream, length: int) -> PrefillChunk:
        """The first `length` positions that have no keys yet."""
        audio = min(length, stream.new_audio)
        return PrefillChunk(stream, stream.prefilled, length, audio, length == stream.prompt_left)


FindCapturedBucket = Callable[[Bucket], Bucket | None]
"""Bucket of the captured graph that would replay a prefill of these sizes; None when it would run eagerly."""


@dataclass(frozen=True)
class PrefillSize:
    """What the bucket and the cost of a pass over prompt chunks depend on."""

    tokens: int = 0
    audio: int = 0
    """Positions that hold patches, at most."""
    sequences: int = 0
    emitting: Mapping[int, int] = field(default_factory=dict)
    """Number of prompts that end, by solver steps."""

    @staticmethod
    def of(chunks: Iterable[PrefillChunk]) -> PrefillSize:
        """Of one pass over these chunks."""
        size = PrefillSize()
        for chunk in chunks:
            size = size.with_chunk(chunk)
        return size

    def with_chunk(self, chunk: PrefillChunk) -> PrefillSize:
        """Of the pass with one more chunk."""
        emitting = self.emitting
        if chunk.is_last:
            solver_steps = chunk.stream.solver_steps
            emitting = {**emitting, solver_steps: emitting.get(solver_steps, 0) + 1}
        tokens, audio = self.tokens + chunk.length, self.audio + chunk.audio
        return PrefillSize(tokens, audio, self.sequences + 1, emitting)

    @property
    def required(self) -> Bucket:
        """The bucket that a captured prefill must have (models.protocol.SpeechModel.prefill_step)."""
        return {"tokens": self.tokens, "audio": self.audio, "sequences": self.sequences}


class Playback:
    """The listener's clock. Playing starts with the first audio and stalls when audio comes too late.

    speed: seconds of audio heard per second; all times here are seconds of listening. `pending` is audio that was
    launched and not delivered yet; the scheduler counts on it. `unsent` is the part of what was delivered that waits in
    the engine and could be sent at once.
    """

    def __init__(self, speed: float = 1.0) -> None:
        self.speed = speed
        self.started: float | None = None
        """When playing began, moved on by every stall; None before the first audio."""
        self.delivered = 0.0
        self.pending = 0.0
        self.unsent = 0.0
        self.underrun = 0.0
        """Silence of all stalls together."""

    def end(self, start: float) -> float:
        """When the listener has heard everything launched so far; `start` stands in until playing has begun."""
        return (start if self.started is None else self.started) + self.delivered + self.pending

    def launch(self, seconds: float) -> None:
        """Records that this many seconds of audio were launched."""
        self.pending += seconds / self.speed

    def drop(self, seconds: float) -> None:
        """Takes back launched audio of an overrun row, after its segment's end."""
        self.pending -= seconds / self.speed

    def deliver(self, now: float, seconds: float) -> None:
        """Delivers audio, which is not sent yet."""
        seconds /= self.speed
        self.pending -= seconds
        if self.started is None:
            self.started = now
        late = max(0.0, now - (self.started + self.delivered))
        self.started += late
        self.delivered += seconds
        self.unsent += seconds
        self.underrun += late

    def send(self) -> None:
        """Records that everything delivered has been sent."""
        self.unsent = 0.0

    def take_back(self) -> None:
        """Takes back what was delivered but not sent."""
        self.delivered -= self.unsent
        self.unsent = 0.0
        if not self.delivered:
            self.started = None

    def in_hand(self, now: float) -> float:
        """Seconds of sent audio that the listener has at `now` and has not heard yet."""
        return 0.0 if self.started is None else max(0.0, self.started + self.delivered - self.unsent - now)


class Phase(Enum):
    """Where a stream is with its current segment."""

    WAITING = "waiting"
    """It has no slot and no pages yet."""
    PREFILL = "prefill"
    """Positions of the current segment's prompt are left to compute."""
    DECODE = "decode"
    """The prompt is computed, and patches are left to launch."""
    LAUNCHED = "launched"
    """Every patch of the segment is launched."""
    IDLE = "idle"
    """The segment has ended, and there is no text to speak yet."""
    PREEMPTED = "preempted"
    """The same, and its slot and pages were taken. It waits for them again once there is text."""


class VoicePage(NamedTuple):
    """digest: of everything that its keys depend on; positions: how many at its front belong to the voice; patches: how
    many of these hold patches."""

    digest: Digest
    positions: int
    patches: int


class PageCopy(NamedTuple):
    """A page that another stream has filled, and the own one that begins with the same keys."""

    source: int
    target: int


@dataclass(eq=False)
class Stream:
    """Written by the scheduler, except where a field says so.

    live: a listener plays the audio while it is made.
    prompt_audio: prompt positions that hold patches. voice: the pages at the front of the prompt that hold the voice's
    reference, whose keys streams of the same voice share, or copy in the last page if it holds more.
    positions: cache positions of the longest segment known so far, prompt and patches together. paused: the transport
    accepts no more audio (set by the worker).
    """

    request_id: str
    live: bool
    arrival: float
    solver_steps: int
    prompt_tokens: int
    max_patches: int
    positions: int
    prompt_audio: int = 0
    voice: tuple[VoicePage, ...] = ()
    phase: Phase = Phase.WAITING
    slot: int = 0
    adapter_slot: int = -1
    pages: list[int] = field(default_factory=list)
    page_copy: PageCopy | None = None
    """To be made before its first positions are computed."""
    prefilled: int = 0
    """Prompt positions that have keys. While it waits: those of its voice that are in the cache now."""
    patches_before: int = 0
    """Patches among the positions that had keys when the current segment began."""
    launched: int = 0
    """Patches of the current segment that were launched, overrun ones included."""
    last_launch: float = 0.0
    paused: bool = False
    playback: Playback = field(default_factory=Playback)

    @property
    def prompt_left(self) -> int:
        return self.prompt_tokens - self.prefilled

    @property
    def new_audio(self) -> int:
        """Patches among the positions that had no keys when the current segment began."""
        return self.prompt_audio - self.patches_before

    @property
    def decodable(self) -> bool:
        return self.phase is Phase.DECODE and not self.paused

    @property
    def waits_for_first_patch(self) -> bool:
        """Whether it can decode and its prompt's prefill had no tail."""
        return self.decodable and self.launched == 0

    @property
    def in_background(self) -> bool:
        """Whether nobody listens yet and there is something to compute."""
        return not (self.live or self.paused) and self.phase in (Phase.WAITING, Phase.PREFILL, Phase.DECODE)

    @property
    def has_text(self) -> bool:
        return self.phase not in (Phase.IDLE, Phase.PREEMPTED)

    @property
    def waits_for_first_audio(self) -> bool:
        return self.live and self.playback.started is None and self.playback.pending == 0.0
