"""The requests of a speech worker: their sequences and segments, and the audio and failures to send."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from models.interfaces.errors import InputError
from models.interfaces.processor import SpeechProcessor
from models.protocol import SpeechModel
from service.engine.core.faults import LaunchError, corrupted, launch_failure, queue_timeout
from service.engine.core.worker import WorkerContext
from service.engine.speech.runner import Outcome
from service.engine.speech.scheduler import SpeechScheduler
from service.engine.speech.sequence import SpeechSequence
from service.engine.speech.stream import Phase, Stream
from service.link.messages import Failed, SpeechAppend, SpeechDelta, SpeechRequest

LEAST_IN_HAND = 1.0
"""Seconds of audio that a listener must have left to wait longer: enough to begin a retry in the meantime."""
MAX_BYTES = 256 << 20
"""Bytes of held-back audio of one model at most. Audio that would exceed it is sent, and its segment cannot be
generated again."""


class UnsentAudio:
    """Retry buffer: the audio of one model, by sequence, that is held back where that delays no listener, so that a
    segment that runs to its cap can be generated again before it is heard. Without a live listener that is the whole
    segment; with one, a later segment while there is enough audio of earlier ones, never the first."""

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


class SpeechRequests:
    """Running and waiting requests by id. However a request ends, its slot and pages are freed here."""

    def __init__(
        self,
        name: str,
        processor: SpeechProcessor,
        model: SpeechModel,
        scheduler: SpeechScheduler,
        context: WorkerContext,
        adapters: Mapping[str, int],
    ) -> None:
        """adapters: their slots by name."""
        self._name = name
        self._processor = processor
        self._model = model
        self._scheduler = scheduler
        self._context = context
        self._adapters = adapters
        self._patch_seconds = scheduler.policy.patch_seconds
        self._sequences: dict[str, SpeechSequence] = {}
        self._unsent = UnsentAudio()
        self._deltas: list[SpeechDelta] = []
        self.failed: list[Failed] = []

    def get(self, request_id: str) -> SpeechSequence | None:
        return self._sequences.get(request_id)

    def of(self, stream: Stream) -> SpeechSequence:
        return self._sequences[stream.request_id]

    def drain(self) -> tuple[tuple[SpeechDelta, ...], tuple[Failed, ...]]:
        """Audio and failures since the last call."""
        deltas, failed = tuple(self._deltas), tuple(self.failed)
        self._deltas, self.failed = [], []
        return deltas, failed

    # Commands

    def submit(self, request: SpeechRequest) -> None:
        """Admits a request or fails it; a bad one never raises."""
        if request.adapter and request.adapter not in self._adapters:
            message = f"model {self._name!r} has no adapter {request.adapter!r}"
            self.failed.append(Failed(request.request_id, 404, "voice_not_found", message, "voice"))
            return
        try:
            sequence = SpeechSequence(request, self._processor, self._model, self._context.config.page_size)
        except InputError as error:
            self.failed.append(Failed(request.request_id, 400, "invalid_value", str(error), error.field))
            return
        sequence.stream.adapter_slot = self._adapters.get(request.adapter, -1)
        sequence.stats.submitted = self._context.clock()
        refusal = self._scheduler.submit(sequence.stream, sequence.stats.submitted)
        if refusal is None:
            self._sequences[request.request_id] = sequence
            return
        self.count_rejection(refusal.reason)
        failure = Failed(request.request_id, 400, "context_length_exceeded", refusal.message, "input")
        if refusal.reason != "too_long":
            message = f"the server is overloaded: {refusal.message}"
            failure = Failed(request.request_id, 503, "overloaded", message, retry_after=refusal.retry_after)
        self.failed.append(failure)

    def append(self, sequence: SpeechSequence, command: SpeechAppend) -> None:
        """More segments for a request whose text is still being written."""
        try:
            positions = max(map(sequence.later_positions, command.segments), default=0)
        except InputError as error:
            self._abandon(sequence, 400, "invalid_value", str(error), error.field)
            return
        if not self._scheduler.room.reserve(sequence.stream, positions):
            self._abandon(sequence, 503, "overloaded", "no room in the cache for a longer segment")
            return
        sequence.segments.extend(command.segments)
        sequence.open = sequence.open and not command.last
        if sequence.idle:
            self._go_on(sequence)

    def fail_timed_out(self, limit: float) -> bool:
        """Fails requests that were submitted before `limit` and had no step yet; True when there were any."""
        waiting = [self._sequences[stream.request_id] for stream in self._scheduler.waiting]
        late = [sequence for sequence in waiting if sequence.segment == 0 and sequence.stats.submitted < limit]
        for sequence in late:
            self.release(sequence)
            self.failed.append(queue_timeout(sequence.request.request_id))
        return bool(late)

    def note_start(self, stream: Stream, now: float) -> None:
        """Before a waiting stream's first step. One that was preempted and goes on does not count again."""
        stats, observations = self._sequences[stream.request_id].stats, self._context.observations
        if stats.scheduled is None:
            positions, cached = stream.prompt_tokens, stream.prefilled
            stats.start(now, observations, model=self._name, positions=positions, cached=cached)

    # Results

    def deliver(self, outcome: Outcome, now: float) -> None:
        """Sends the audio of one row, or holds it back. An overrun row, or one of an aborted stream, is ignored."""
        sequence = outcome.sequence
        request_id = sequence.request.request_id
        if self._sequences.get(request_id) is not sequence or outcome.segment != sequence.segment or sequence.idle:
            return
        if not outcome.finite:
            self.release(sequence)
            self.failed.append(corrupted(request_id, self._name, self._context.observations))
            return
        sequence.keep(outcome.patch)
        first = sequence.stream.playback.started is None
        sequence.stream.playback.deliver(now, self._patch_seconds)
        self._context.observations.count("audio_generated_seconds_total", self._patch_seconds, model=self._name)
        truncated = outcome.finished and not outcome.stopped
        if truncated and sequence.may_retry:
            self._retry(sequence)
            return
        finished = outcome.finished and not sequence.may_continue
        delta = SpeechDelta(
            request_id=request_id,
            audio=outcome.audio,
            segment=outcome.segment,
            segment_done=outcome.finished,
            finished=finished,
            truncated=truncated,
            steps=sequence.stats.counts() if finished else None,
            times=sequence.stats.times(now) if first else None,
        )
        self._unsent.add(sequence, delta)
        if outcome.finished or not self._unsent.may_wait(sequence, now):
            self._deltas += self._unsent.take(sequence)
        if outcome.finished:
            self._scheduler.end_segment(sequence.stream, sequence.patches)
            if finished:
                self.release(sequence)
            else:
                self._go_on(sequence)

    def send_due(self, now: float) -> None:
        """Sends held-back audio to listeners who need it soon."""
        for sequence in self._unsent.due(now):
            self._deltas += self._unsent.take(sequence)

    def _retry(self, sequence: SpeechSequence) -> None:
        """Starts the current segment again, with another seed. The keys of its prompt are in the cache, and none of its
        steps is in flight, since it has run to its cap."""
        self._context.observations.count("speech_retries_total", model=self._name)
        self._scheduler.end_segment(sequence.stream, sequence.patches)
        self._unsent.discard(sequence)
        sequence.stream.playback.take_back()
        sequence.retry()
        self._begin(sequence, shared=len(sequence.prompt.token_ids) - 1)

    def _begin(self, sequence: SpeechSequence, shared: int) -> None:
        """shared: leading positions of the current segment's prompt that have keys."""
        prompt = sequence.prompt
        self._scheduler.begin_segment(
            sequence.stream,
            len(prompt.token_ids),
            len(prompt.patches),
            prompt.max_patches,
            cached=shared,
            patches_before=int(prompt.audio_mask[:shared].sum()),
        )

    def _go_on(self, sequence: SpeechSequence) -> None:
        """After a segment: begins the next one, or ends the stream when no further segment can come."""
        if sequence.segments:
            before, preempted = sequence.prompt, sequence.stream.phase is Phase.PREEMPTED
            sequence.next_segment()
            prompt = sequence.prompt
            shared = 0 if preempted else min(prompt.common_prefix(before), len(prompt.token_ids) - 1)
            self._begin(sequence, shared)
        elif not sequence.open:
            nothing = np.zeros(0, dtype=np.float32)
            counts = sequence.stats.counts()
            self._deltas.append(
                SpeechDelta(sequence.request.request_id, nothing, sequence.segment, finished=True, steps=counts)
            )
            self.release(sequence)

    # Ends

    def count_rejection(self, reason: str) -> None:
        self._context.observations.count("speech_rejections_total", model=self._name, reason=reason)

    def abandon_all(self, streams: Sequence[Stream], error: LaunchError) -> None:
        """Fails the streams of a failed launch."""
        for stream in streams:
            self.release(self._sequences[stream.request_id])
            self.failed.append(launch_failure(stream.request_id, error))

    def _abandon(
        self, sequence: SpeechSequence, status: int, code: str, message: str, field: str | None = None
    ) -> None:
        self.release(sequence)
        self.failed.append(Failed(sequence.request.request_id, status, code, message, field))

    def release(self, sequence: SpeechSequence) -> None:
        """Frees slot and pages at once: later launches run later and overwrite them before reading."""
        del self._sequences[sequence.request.request_id]
        self._unsent.discard(sequence)
        self._scheduler.release(sequence.stream)
