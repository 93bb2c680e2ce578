"""A prefill for scheduler, forecast and runner: its chunks, the bucket it requires, the key of its cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from models.protocol import Bucket
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


FindCapturedBucket = Callable[[Bucket], Bucket | None]
"""Bucket of the captured graph that would replay a prefill of these sizes; None when it would run eagerly."""


def required_prefill(chunks: Sequence[PrefillChunk]) -> Bucket | None:
    """The bucket that a captured prefill must have (models.protocol.SpeechModel.prefill_step); None if a chunk has
    cached context."""
    if any(chunk.start for chunk in chunks):
        return None
    return {
        "tokens": sum(chunk.length for chunk in chunks),
        "audio": sum(chunk.audio for chunk in chunks),
        "sequences": len(chunks),
    }


def replayed_prefill(bucket: Bucket) -> tuple[Kind, int]:
    """Kind and size under which the cost of a replayed prefill is kept."""
    return ("audio_prefill" if bucket["audio"] else "text_prefill", bucket["tokens"])


def eager_prefill(tokens: int) -> tuple[Kind, int]:
    return ("prefill", tokens)
