"""Audio that waits where nobody misses it, so that a segment which runs to its cap can be drawn again unheard.

A request that nobody listens to live can wait for the whole segment. A live listener can wait for a later segment while
there is sound enough of those before it: the audio is sent when the segment ends, or when that sound runs low. A live
request's first segment never waits, since its listener has nothing yet.
"""

from __future__ import annotations

from service.engine.speech.sequence import SpeechSequence
from service.link.messages import SpeechDelta

LEAST_IN_HAND = 1.0
"""Seconds of sound with which a listener can still wait: enough to begin another take meanwhile."""
MAX_BYTES = 256 << 20
"""Of all that waits for one model. What would exceed it is sent, and cannot be drawn again."""


class UnsentAudio:
    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._deltas: dict[SpeechSequence, list[SpeechDelta]] = {}
        self._bytes = 0

    def add(self, sequence: SpeechSequence, delta: SpeechDelta) -> None:
        self._deltas.setdefault(sequence, []).append(delta)
        self._bytes += delta.audio.nbytes

    def may_wait(self, sequence: SpeechSequence, now: float) -> bool:
        """Whether waiting serves a purpose, and nobody misses the audio."""
        stream = sequence.stream
        return (
            sequence.may_draw_again
            and self._bytes <= self._max_bytes
            and (not stream.live or stream.playback.in_hand(now) > LEAST_IN_HAND)
        )

    def due(self, now: float) -> list[SpeechSequence]:
        """Whose audio cannot wait any longer."""
        return [sequence for sequence in self._deltas if not self.may_wait(sequence, now)]

    def take(self, sequence: SpeechSequence) -> list[SpeechDelta]:
        """The audio in order, which is to be sent now."""
        sequence.heard = True
        sequence.stream.playback.send()
        return self.discard(sequence)

    def discard(self, sequence: SpeechSequence) -> list[SpeechDelta]:
        deltas = self._deltas.pop(sequence, [])
        self._bytes -= sum(delta.audio.nbytes for delta in deltas)
        return deltas
