"""Audio that is held back where that delays no listener, so that a segment that runs to its cap can be generated again
before it is heard. A request without a live listener can wait for the whole segment. A live listener can wait for a
later segment while there is enough audio of earlier ones: the held-back audio is sent when the segment ends, or when
that audio runs low. The first segment of a live request is never held back, since its listener has nothing yet.
"""

from __future__ import annotations

from service.engine.speech.sequence import SpeechSequence
from service.link.messages import SpeechDelta

LEAST_IN_HAND = 1.0
"""Seconds of audio that a listener must have left to wait longer: enough to begin a retry in the meantime."""
MAX_BYTES = 256 << 20
"""Bytes of held-back audio of one model at most. Audio that would exceed it is sent, and its segment cannot be
generated again."""


class UnsentAudio:
    """The held-back audio of one model, by sequence."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._max_bytes = max_bytes
        self._deltas: dict[SpeechSequence, list[SpeechDelta]] = {}
        self._bytes = 0

    def add(self, sequence: SpeechSequence, delta: SpeechDelta) -> None:
        self._deltas.setdefault(sequence, []).append(delta)
        self._bytes += delta.audio.nbytes

    def may_wait(self, sequence: SpeechSequence, now: float) -> bool:
        """Whether holding back the audio is of use and delays no listener."""
        stream = sequence.stream
        return (
            sequence.may_retry
            and self._bytes <= self._max_bytes
            and (not stream.live or stream.playback.in_hand(now) > LEAST_IN_HAND)
        )

    def due(self, now: float) -> list[SpeechSequence]:
        """Sequences whose audio cannot be held back any longer."""
        return [sequence for sequence in self._deltas if not self.may_wait(sequence, now)]

    def take(self, sequence: SpeechSequence) -> list[SpeechDelta]:
        """The held-back audio in order, to be sent now."""
        sequence.heard = True
        sequence.stream.playback.send()
        return self.discard(sequence)

    def discard(self, sequence: SpeechSequence) -> list[SpeechDelta]:
        deltas = self._deltas.pop(sequence, [])
        self._bytes -= sum(delta.audio.nbytes for delta in deltas)
        return deltas
