"""A prefill for scheduler, forecast and runner: its chunks, the bucket it requires, the key of its cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from models.interfaces.capturable import Bucket
from service.engine.speech.costs import Kind
from service.engine.speech.stream import Stream
from service.graphs.buckets import round_up


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


def replayed_cost_key(bucket: Bucket) -> tuple[Kind, int]:
    """Kind and size under which the cost of a replayed prefill is kept."""
    tokens, audio = bucket["tokens"], bucket["audio"]
    if not audio:
        return "text_prefill", tokens
    return "voice_prefill" if audio < tokens else "audio_prefill", tokens


def eager_cost_key(tokens: int) -> tuple[Kind, int]:
    """Kind and size under which the cost of an eager prefill is kept: rounded up, so that each size is measured
    often."""
    return "prefill", round_up(tokens)
