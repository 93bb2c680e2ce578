"""A prefill in the terms that scheduler, forecasts and runner share: chunks, needs, and the kind of its cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from service.engine.speech.costs import Kind
from service.engine.speech.stream import Stream


@dataclass(frozen=True)
class PrefillChunk:
    """Prompt positions [start, start + length) of a stream; `last` ends the prompt, so that the tail follows."""

    stream: Stream
    start: int
    length: int

    @property
    def last(self) -> bool:
        return self.start + self.length == self.stream.prompt_tokens

    @property
    def audio(self) -> int:
        """Most patches among its positions."""
        return min(self.length, self.stream.prompt_audio)


Capacity = Mapping[str, int]
Recorded = Callable[[Capacity], Capacity | None]
"""Capacity of the recording that would replay a prefill of these needs; None when it would run eagerly."""


def prefill_needs(chunks: Sequence[PrefillChunk]) -> Capacity | None:
    """What a recorded prefill must hold (models.protocol.SpeechModel.prefill_step); None where a chunk has a past."""
    if any(chunk.start for chunk in chunks):
        return None
    return {
        "tokens": sum(chunk.length for chunk in chunks),
        "audio": sum(chunk.audio for chunk in chunks),
        "sequences": len(chunks),
    }


def replayed_prefill(capacity: Capacity) -> tuple[Kind, int]:
    """Kind and size under which the cost of a recorded prefill is known."""
    return ("clip_prefill" if capacity["audio"] else "text_prefill", capacity["tokens"])


def eager_prefill(tokens: int) -> tuple[Kind, int]:
    return ("prefill", tokens)
