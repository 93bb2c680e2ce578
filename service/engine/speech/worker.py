"""The worker of a speech model: requests in, scheduled steps on the GPU, audio out.

What the engine loop asks of it is described at service.engine.worker.ModelWorker. Every step is launched before the
results of the one before it have been read; a stream whose stop was not known yet takes part once more, and that
surplus row changes nothing (models.protocol.SpeechModel).
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch

from models.errors import InputError
from models.processor import SpeechProcessor
from models.protocol import SpeechModel
from service.engine.arrival import Arrival
from service.engine.faults import LAUNCH_ERRORS, PrefillError, launch_failure
from service.engine.messages import (
    Abort,
    EncodeReference,
    Failed,
    ModelState,
    Outputs,
    Pause,
    ReferenceEncoded,
    SpeechAppend,
    SpeechDelta,
    SpeechRequest,
)
from service.engine.pages import PagePool
from service.engine.speech import scratch
from service.engine.speech.costs import CostModel
from service.engine.speech.plans import pages_for, slot_state
from service.engine.speech.references import ClipQueue
from service.engine.speech.runner import Flight, Outcome, SpeechRunner, Timing
from service.engine.speech.scheduler import Policy, SpeechScheduler, Step
from service.engine.speech.sequence import SpeechSequence
from service.engine.speech.stream import Phase, Stream
from service.engine.worker import QUEUE_RETRY_AFTER, Control, MemoryNeeds, Request, WorkerContext
from service.graphs.buckets import row_ladder
from service.graphs.runner import GraphRunner

log = logging.getLogger(__name__)

FIRST_AUDIO_TARGET = 2.0
MAX_LOAD = 0.8
"""On a GPU, where the operator names none. A CPU is for trying things out: it refuses nobody for being slow."""
IN_FLIGHT = 2
LEAD = 0.004
"""Seconds before the running step's end at which the next one is chosen: late enough for what arrives meanwhile."""
POLL = 0.0003


def create_worker(name: str, processor: SpeechProcessor, model: SpeechModel, context: WorkerContext) -> SpeechWorker:
    return SpeechWorker(name, processor, model, context)


class SpeechWorker:
    def __init__(self, name: str, processor: SpeechProcessor, model: SpeechModel, context: WorkerContext) -> None:
        config = context.config
        self.name = name
        self._processor = processor
        self._model = model
        self._context = context
        self._patch_seconds = model.samples_per_patch / model.sample_rate
        self._buckets = tuple(sorted(config.decode_buckets) or row_ladder(config.max_running))
        context_pages = pages_for(model.max_positions, config.page_size)
        row_bytes = sum(spec.bytes_per_token(context.dtype) for spec in model.cache_specs())
        self.page_bytes = row_bytes * config.page_size
        self.max_pages = 1 + config.max_running * context_pages
        self.min_pages = 1 + context_pages
        self._costs = CostModel()
        self._clips = ClipQueue(model, context.device, config.max_waiting)
        self._sequences: dict[str, SpeechSequence] = {}
        self._flights: deque[Flight] = deque()
        self._free_at = -math.inf
        """When the GPU is predicted to be free for the next step."""
        self._planned: Step | None = None
        self._clip_turn = False
        self._deltas: list[SpeechDelta] = []
        self._failed: list[Failed] = []
        self._calibrated = False

    # Start

    def measure(self) -> MemoryNeeds:
        config, device = self._context.config, self._context.device
        state = slot_state(
            self._model,
            config.max_running,
            pages_for(self._model.max_positions, config.page_size),
            torch.device("meta"),
        )
        state_bytes = sum(table.numel() * table.element_size() for table in state.values())
        if device.type != "cuda":
            return MemoryNeeds(state=state_bytes)
        runner = self._make_runner(num_pages=2)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        scratch.largest_shapes(runner, config.max_step_tokens, clip_samples=self._processor.reference_sample_rate * 4)
        torch.cuda.synchronize(device)
        peak = torch.cuda.max_memory_allocated(device) - before
        return MemoryNeeds(workspace=peak, graphs=peak, state=state_bytes)

    def allocate(self, num_pages: int) -> None:
        config = self._context.config
        on_gpu = self._context.device.type == "cuda"
        self._pages = PagePool(num_pages, config.page_size)
        self._runner = self._make_runner(num_pages)
        policy = Policy(
            buckets=self._buckets,
            max_streams=config.max_running,
            patch_seconds=self._patch_seconds,
            max_waiting=config.max_waiting,
            first_audio_target=config.first_audio_target or FIRST_AUDIO_TARGET,
            refuse_after=config.first_audio_target or (FIRST_AUDIO_TARGET if on_gpu else math.inf),
            max_load=config.max_speech_load or (MAX_LOAD if on_gpu else math.inf),
            prefill_tokens=config.max_step_tokens,
            codec_beside=self._runner.codec_beside,
        )
        self._scheduler = SpeechScheduler(policy, self._costs, self._pages, self._runner.recorded_prefill)

    def _make_runner(self, num_pages: int) -> SpeechRunner:
        return SpeechRunner(
            self.name,
            self._model,
            self._context,
            num_pages=num_pages,
            max_streams=self._context.config.max_running,
            buckets=self._buckets,
        )

    @property
    def graph_runners(self) -> list[GraphRunner]:
        return self._runner.graph_runners

    def capture_next(self, *, idle: bool) -> bool:
        if any(runner.capture_next(idle=idle) for runner in self.graph_runners):
            return True
        if not self._calibrated:
            self._calibrated = True
            self._calibrate()
        return False

    def _calibrate(self) -> None:
        buckets: Sequence[int] = self._buckets
        lengths = [64, 512, self._context.config.max_step_tokens]
        if self._context.device.type != "cuda":
            buckets, lengths = sorted({buckets[0], buckets[-1]}), lengths[:1]
        scratch.calibrate(self._runner, self._costs, buckets, lengths)

    def warm_up(self) -> None:
        config = self._context.config
        scratch.warm_up(self._runner, max_rows=config.max_running, step_tokens=config.max_step_tokens)

    # Commands

    def submit(self, request: Request) -> None:
        self._planned = None
        if isinstance(request, EncodeReference):
            self._submit_clip(request)
            return
        assert isinstance(request, SpeechRequest)
        model = self._model
        try:
            sequence = SpeechSequence(request, self._processor, model.patch_shape, model.priming_patches)
        except InputError as error:
            self._fail(request.request_id, 400, "invalid_value", str(error), field=error.field)
            return
        refusal = self._scheduler.submit(sequence.stream, self._context.clock())
        if refusal is not None:
            self._context.observations.count("speech_rejections_total", model=self.name, reason=refusal.reason)
            if refusal.reason == "too_long":
                self._fail(request.request_id, 400, "context_length_exceeded", refusal.message, field="input")
            else:
                message = f"the server is overloaded: {refusal.message}"
                self._fail(request.request_id, 503, "overloaded", message, retry_after=refusal.retry_after)
            return
        self._sequences[request.request_id] = sequence

    def _submit_clip(self, request: EncodeReference) -> None:
        if self._clips.full:
            self._context.observations.count("speech_rejections_total", model=self.name, reason="queue_full")
            message = "the server is overloaded: too many clips are waiting"
            self._fail(request.request_id, 503, "overloaded", message, retry_after=1.0)
            return
        self._clips.submit(request)

    def control(self, command: Control) -> None:
        self._planned = None
        if isinstance(command, Abort):
            self._clips.abort(command.request_id)
        sequence = self._sequences.get(command.request_id)
        if sequence is None:
            return
        match command:
            case Abort():
                self._release(sequence)
            case Pause():
                sequence.stream.paused = command.paused
            case SpeechAppend():
                self._append(sequence, command)

    def end_waits(self, now: float) -> None:
        limit = now - self._context.config.queue_timeout
        streams = [stream.request_id for stream in self._scheduler.waiting if stream.arrival < limit]
        clips = self._clips.arrived_before(limit)
        for request_id in streams:
            self._planned = None
            self._release(self._sequences[request_id])
        for request_id in clips:
            self._clips.abort(request_id)
        for request_id in (*streams, *clips):
            message = "the request waited too long for its turn"
            self._fail(request_id, 503, "queue_timeout", message, retry_after=QUEUE_RETRY_AFTER)

    def _append(self, sequence: SpeechSequence, command: SpeechAppend) -> None:
        try:
            positions = max(map(sequence.later_positions, command.segments), default=0)
        except InputError as error:
            self._abandon(sequence, 400, "invalid_value", str(error), error.field)
            return
        if not self._scheduler.reserve(sequence.stream, positions):
            self._abandon(sequence, 503, "overloaded", "no room in the cache for a longer segment")
            return
        sequence.segments.extend(command.segments)
        sequence.open = sequence.open and not command.last
        if sequence.idle:
            self._go_on(sequence)

    # Stepping

    def has_work(self) -> bool:
        if len(self._flights) >= IN_FLIGHT:
            return False
        now = self._context.clock()
        if self._flights and self._context.device.type == "cuda" and self.backlog(now) > LEAD:
            return False
        return self._plan(now) is not None or len(self._clips) > 0

    def _plan(self, now: float) -> Step | None:
        if self._planned is None:
            self._planned = self._scheduler.next_step(max(now, self._free_at))
        return self._planned

    def slack(self, now: float) -> float:
        slack = self._scheduler.least_slack(now)
        if math.isinf(slack):
            return slack
        listeners = sum(stream.live for stream in self._scheduler.running)
        return slack - self._scheduler.forecast.decode_bound(self._model.solver_steps[0], listeners)

    def backlog(self, now: float) -> float:
        return max(0.0, self._free_at - now) if self._flights else 0.0

    def least(self) -> float:
        return self._planned.predicted if self._planned is not None else self._costs.mean("clip", 0, 1)

    def tick(self, now: float, allowance: float, *, must: bool = False) -> bool:
        if must:
            allowance = math.inf  # What it plans is the smallest unit: the listeners have one clock.
        step = self._plan(now)
        self._planned = None
        if self._clip_goes_first(step, now):
            return self._launch_clip(now, allowance)
        if step is None or step.predicted > allowance:
            return False
        start = max(now, self._free_at)
        self._observe_slack(start)
        for chunk in step.prefills:
            if chunk.stream.phase is Phase.WAITING:
                waited = now - chunk.stream.arrival
                self._context.observations.observe("queue_duration_seconds", waited, model=self.name)
        self._scheduler.launch(step, start)
        try:
            flight = self._launch(step, now)
        except torch.AcceleratorError:
            raise
        except PrefillError as error:
            log.exception("a prefill failed; its requests end")
            for stream in step.decodes:
                self._scheduler.undo(stream)
            self._abandon_all([chunk.stream for chunk in step.prefills], error)
            return True
        except LAUNCH_ERRORS as error:
            log.exception("a step failed; its requests end")
            self._abandon_all([*(chunk.stream for chunk in step.prefills), *step.decodes], error)
            return True
        self._book(flight, now)
        return True

    def _launch(self, step: Step, now: float) -> Flight:
        riders = [self._sequences[stream.request_id] for stream in step.decodes]
        if not step.prefills:
            return self._runner.launch_decode(riders, step.decodes[0].solver_steps, predicted=step.predicted, now=now)
        chunks = [(chunk, self._sequences[chunk.stream.request_id]) for chunk in step.prefills]
        return self._runner.launch_prefill(chunks, riders, predicted=step.predicted, now=now)

    def _clip_goes_first(self, step: Step | None, now: float) -> bool:
        """Clips take turns with steps, as long as the least slack covers a piece and the step after it."""
        if not len(self._clips):
            return False
        if step is None:
            return True
        cost = self._costs.bound("clip", 0, 1)
        self._clip_turn = not self._clip_turn and self.slack(max(now, self._free_at)) > cost
        return self._clip_turn

    def _launch_clip(self, now: float, allowance: float) -> bool:
        predicted = self._costs.mean("clip", 0, 1)
        if predicted > allowance:
            return False
        request_id = self._clips.next_id
        start = self._runner.clock.mark()
        try:
            patches = self._clips.launch()
        except torch.AcceleratorError:
            raise
        except LAUNCH_ERRORS as error:
            log.exception("encoding a clip failed")
            self._clips.abort(request_id)
            self._failed.append(launch_failure(request_id, error))
            return True
        arrives = torch.zeros(1, device=self._context.device) if patches is None else patches
        flight = Flight([], Arrival({"patches": arrives}, self._context.device), predicted, now, "clip", "eager")
        if patches is None:
            flight.timings = [Timing("clip", 0, 1, start, self._runner.clock.mark())]
        else:
            flight.clip = request_id
        self._book(flight, now)
        return True

    def _book(self, flight: Flight, now: float) -> None:
        self._flights.append(flight)
        on_gpu = self._context.device.type == "cuda"
        self._free_at = max(now, self._free_at) + flight.predicted if on_gpu else self._context.clock()

    def oldest_launch(self) -> float | None:
        return self._flights[0].launched if self._flights else None

    def wait(self) -> None:
        """Until the oldest results are there, or until it is time to choose the next step."""
        arrival = self._flights[0].arrival
        if len(self._flights) < IN_FLIGHT and self._context.device.type == "cuda":
            while not arrival.ready() and self.backlog(self._context.clock()) > LEAD:
                time.sleep(POLL)
            if not arrival.ready() and self.has_work():
                return
        arrival.wait()

    def collect(self) -> Outputs:
        now = self._context.clock()
        encoded = []
        while self._flights and self._flights[0].arrival.ready():
            self._planned = None
            flight = self._flights.popleft()
            self._learn(flight, now)
            if flight.clip is not None:
                encoded.append(ReferenceEncoded(flight.clip, flight.arrival.read()["patches"].copy()))
            for outcome in self._runner.outcomes(flight):
                self._take(outcome, now)
        if self._flights:
            self._free_at = min(self._free_at, now + sum(flight.predicted for flight in self._flights))
        outputs = Outputs(speech=tuple(self._deltas), encoded=tuple(encoded), failed=tuple(self._failed))
        self._deltas, self._failed = [], []
        return outputs

    def state(self) -> ModelState:
        scheduler = self._scheduler
        return ModelState(
            model=self.name,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            slots_used=len(scheduler.running),
            pages_total=self._pages.num_pages - 1,
            pages_used=self._pages.num_used,
            pages_cached=0,
        )

    # Results

    def _learn(self, flight: Flight, now: float) -> None:
        """Measured costs and metrics of a launch whose results have arrived."""
        observe, actual = self._context.observations.observe, 0.0
        for timing in flight.timings:
            seconds = self._runner.clock.seconds(timing.start, timing.end)
            self._costs.observe(timing.kind, timing.solver_steps, timing.size, seconds)
            part = "prefill" if timing.kind in ("text_prefill", "clip_prefill") else timing.kind
            observe("speech_part_duration_seconds", seconds, model=self.name, part=part)
            if timing.kind != "vae" or not self._runner.codec_beside:
                actual += seconds
        observe("step_duration_seconds", now - flight.launched, model=self.name, kind=flight.kind, route=flight.route)
        if actual and flight.predicted:
            observe("step_prediction_ratio", actual / flight.predicted, model=self.name, kind=flight.kind)

    def _take(self, outcome: Outcome, now: float) -> None:
        """Audio of one row, unless its stream has ended: by an abort, or by a stop that was read after the launch."""
        sequence = outcome.sequence
        request_id = sequence.request.request_id
        if self._sequences.get(request_id) is not sequence or outcome.segment != sequence.segment or sequence.idle:
            return
        sequence.keep(outcome.patch)
        sequence.stream.playback.deliver(now, self._patch_seconds)
        self._context.observations.count("audio_generated_seconds_total", self._patch_seconds, model=self.name)
        finished = outcome.finished and not sequence.may_continue
        self._deltas.append(
            SpeechDelta(
                request_id=request_id,
                audio=outcome.audio,
                segment=outcome.segment,
                segment_done=outcome.finished,
                finished=finished,
                truncated=outcome.finished and not outcome.stopped,
            )
        )
        if outcome.finished:
            self._scheduler.end_segment(sequence.stream, sequence.patches)
            sequence.idle = True
            if finished:
                self._release(sequence)
            else:
                self._go_on(sequence)

    def _go_on(self, sequence: SpeechSequence) -> None:
        """After a segment: the next one if there is one, the end if none can come."""
        if sequence.segments:
            before = sequence.prompt
            sequence.next_segment()
            sequence.idle = False
            prompt = sequence.prompt
            shared = min(prompt.common_prefix(before), len(prompt.token_ids) - 1)
            self._scheduler.begin_segment(
                sequence.stream, len(prompt.token_ids), len(prompt.patches), prompt.max_patches, shared
            )
        elif not sequence.open:
            nothing = np.zeros(0, dtype=np.float32)
            self._deltas.append(SpeechDelta(sequence.request.request_id, nothing, sequence.segment, finished=True))
            self._release(sequence)

    def _observe_slack(self, start: float) -> None:
        slack = self._scheduler.least_slack(start)
        if math.isfinite(slack):
            self._context.observations.observe("audio_slack_seconds", slack, model=self.name)

    # Ends

    def _fail(
        self,
        request_id: str,
        status: int,
        code: str,
        message: str,
        *,
        field: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        self._failed.append(Failed(request_id, status, code, message, field, retry_after))

    def _abandon(
        self, sequence: SpeechSequence, status: int, code: str, message: str, field: str | None = None
    ) -> None:
        self._release(sequence)
        self._fail(sequence.request.request_id, status, code, message, field=field)

    def _abandon_all(self, streams: Sequence[Stream], error: Exception) -> None:
        for stream in streams:
            self._release(self._sequences[stream.request_id])
            self._failed.append(launch_failure(stream.request_id, error))

    def _release(self, sequence: SpeechSequence) -> None:
        """Slot and pages are free at once: what is launched later runs later, and overwrites them before it reads."""
        del self._sequences[sequence.request.request_id]
        self._scheduler.release(sequence.stream)
