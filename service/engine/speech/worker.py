"""The worker of a speech model: requests in, scheduled steps on the GPU, audio out.

Every step is launched before the results of the one before it have been read. A stream whose stop was not known yet
takes part once more; that overrun row changes nothing (models.protocol.SpeechModel).
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from models.interfaces.processor import SpeechProcessor
from models.protocol import SpeechModel
from service.engine.core.faults import LaunchError, launch_errors, launch_failure, queue_timeout
from service.engine.core.pages import PagePool, pages_for
from service.engine.core.readback import Readback, mark, seconds_between
from service.engine.core.worker import UNNOTICED, MemoryRequirements, WorkerContext
from service.engine.memory import peak_bytes
from service.engine.speech.capacity import AdapterFiles
from service.engine.speech.forecast import REPLAYED_PREFILLS, Forecast, Policy, SpeechCosts
from service.engine.speech.references import ReferenceQueue
from service.engine.speech.requests import SpeechRequests
from service.engine.speech.runner import Launch, SpeechRunner, Timing, slot_state
from service.engine.speech.scheduler import BackgroundShare, SpeechScheduler, Step
from service.engine.speech.stream import Phase
from service.graphs.buckets import chosen_buckets, row_buckets
from service.graphs.runner import GraphRunner
from service.link.messages import (
    Abort,
    Control,
    EncodeReference,
    Failed,
    ModelState,
    Outputs,
    Pause,
    ReferenceEncoded,
    Request,
    SpeechAppend,
    SpeechRequest,
)

log = logging.getLogger(__name__)

FIRST_AUDIO_TARGET = 2.0
"""Seconds."""
MAX_LOAD = 0.8
"""Share of real time. Both are defaults on a GPU. A CPU is for trying things out, so by default it refuses nothing for
being slow."""
POLL = 0.0003
"""Seconds between two looks whether results have arrived or the next step must be chosen."""
_CPU_ROWS = 8
"""Number of streams in a step on a CPU, where more gain nothing and would only make the start longer."""
MAX_IN_FLIGHT = 2
"""Launches with results that may be in flight. One without may be beside them: a prefill whose first patches are rows
of the next step."""
LEAD = 0.004
"""The next step is chosen this many seconds before the running one ends, so that it includes late arrivals."""
_READ_WEIGHT = 0.1
"""Weight of a measurement in the running mean of a row's seconds."""


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
        self._row_seconds += _READ_WEIGHT * ((now - began) / rows - self._row_seconds)
        self._reading = None


class SpeechWorker:
    """Implements service.engine.core.worker.ModelWorker."""

    def __init__(self, name: str, processor: SpeechProcessor, model: SpeechModel, context: WorkerContext) -> None:
        config = context.config
        self.name, self.slots = name, config.slots
        self.state_rows = self.state_row_bytes = 0
        self._processor = processor
        self._model = model
        self._context = context
        most = min(config.slots, _CPU_ROWS) if context.device.type == "cpu" else config.slots
        self._buckets = tuple(chosen_buckets(config.decode_buckets, config.slots) or row_buckets(most))
        context_pages = pages_for(model.max_positions, config.page_size)
        row_bytes = sum(spec.bytes_per_token(context.dtype) for spec in model.cache_specs())
        self.page_bytes = row_bytes * config.page_size
        self._adapters = AdapterFiles(config, model)
        self.max_pages = 1 + config.slots * context_pages
        self.min_pages = 1 + context_pages
        self._costs = SpeechCosts()
        self._references = ReferenceQueue(model, context.device, config.max_waiting)
        self._in_flight = InFlight(context.clock, on_gpu=context.device.type == "cuda")
        self._planned: Step | None = None
        """The next step, until something comes that may change the scheduler's choice."""
        self._reference_first = False
        self._reference_share = BackgroundShare()

    # Start

    def measure(self) -> MemoryRequirements:
        config, device = self._context.config, self._context.device
        state = slot_state(
            self._model, config.slots, pages_for(self._model.max_positions, config.page_size), torch.device("meta")
        )
        state_bytes = sum(table.numel() * table.element_size() for table in state.values())
        state_bytes += self._adapters.num_bytes(self._context.dtype)
        if device.type == "cpu":
            return MemoryRequirements(state=state_bytes)
        runner, samples = self._make_runner(num_pages=2), self._processor.reference_sample_rate * 4
        codec = peak_bytes(runner.largest_codec_run, device)
        steps = max(peak_bytes(run, device) for run in runner.largest_runs(samples))
        return MemoryRequirements(steps, state_bytes + codec)

    def allocate(self, num_pages: int) -> None:
        config = self._context.config
        on_gpu = self._context.device.type == "cuda"
        self._pages = PagePool(num_pages, config.page_size)
        self._runner = self._make_runner(num_pages)
        self._adapters.load(self._runner.bank)
        policy = Policy(
            buckets=self._buckets,
            max_streams=config.slots,
            patch_seconds=self._model.samples_per_patch / self._model.sample_rate,
            max_waiting=config.max_waiting,
            first_audio_target=config.first_audio_target or FIRST_AUDIO_TARGET,
            refuse_after=config.first_audio_target or (FIRST_AUDIO_TARGET if on_gpu else math.inf),
            max_load=config.max_speech_load or (MAX_LOAD if on_gpu else math.inf),
            prefill_tokens=config.max_step_tokens,
        )
        codec_beside = self._runner.codec.beside
        self._forecast = Forecast(self._costs, self._runner.captured_prefill, policy, codec_beside=codec_beside)
        self._scheduler = SpeechScheduler(policy, self._forecast, self._pages)
        count = self._context.observations.count
        self._scheduler.room.on_preemption = partial(count, "speech_preemptions_total", model=self.name)
        self._requests = SpeechRequests(
            self.name, self._processor, self._model, self._scheduler, self._context, self._adapters.slots
        )

    def _make_runner(self, num_pages: int) -> SpeechRunner:
        return SpeechRunner(
            self.name, self._model, self._context, num_pages=num_pages, buckets=self._buckets, adapters=self._adapters
        )

    @property
    def graph_runners(self) -> list[GraphRunner]:
        return self._runner.graph_runners

    def calibrate(self) -> None:
        buckets: Sequence[int] = self._buckets
        lengths = [64, 512, self._context.config.max_step_tokens]
        if self._context.device.type != "cuda":
            buckets, lengths = sorted({buckets[0], buckets[-1]}), lengths[:1]
        self._runner.calibrate(self._costs, buckets, lengths)

    def warm_up(self) -> Iterator[None]:
        return self._runner.warm_up()

    # Commands

    def submit(self, request: Request) -> None:
        self._planned = None
        if isinstance(request, SpeechRequest):
            self._requests.submit(request)
        elif isinstance(request, EncodeReference):
            self._submit_reference(request)
        else:
            raise TypeError(f"a chat request was sent to the speech model {self.name}")

    def _submit_reference(self, request: EncodeReference) -> None:
        if self._references.full:
            self._requests.count_rejection("queue_full")
            message = "the server is overloaded: too many reference audio clips are waiting to be encoded"
            self._requests.failed.append(Failed(request.request_id, 503, "overloaded", message, retry_after=1.0))
            return
        self._references.submit(request)

    def control(self, command: Control) -> None:
        self._planned = None
        if isinstance(command, Abort):
            self._references.abort(command.request_id)
        sequence = self._requests.get(command.request_id)
        if sequence is None:
            return
        match command:
            case Abort():
                self._requests.release(sequence)
            case Pause():
                sequence.stream.paused = command.paused
            case SpeechAppend():
                self._requests.append(sequence, command)

    def fail_timed_out(self, now: float) -> None:
        limit = now - self._context.config.queue_timeout
        if self._requests.fail_timed_out(limit):
            self._planned = None
        for request_id in self._references.arrived_before(limit):
            self._references.abort(request_id)
            self._requests.failed.append(queue_timeout(request_id))

    # Stepping

    def has_work(self) -> bool:
        now = self._context.clock()
        self._in_flight.note_read(now)
        if not (self._in_flight.has_room and self._in_flight.near_end(now)):
            return False
        return self._next_step(now) is not None or len(self._references) > 0

    def _next_step(self, now: float) -> Step | None:
        if self._planned is None:
            self._planned = self._scheduler.next_step(max(now, self._in_flight.free_at))
        return self._planned

    def slack(self, now: float) -> float:
        slack = self._scheduler.least_slack(now)
        if math.isinf(slack):
            return slack
        listeners = sum(stream.live and stream.has_text for stream in self._scheduler.running)
        return slack - self._forecast.decode_bound(self._runner.solver_steps[0], listeners)

    def backlog(self, now: float) -> float:
        return self._in_flight.backlog(now)

    def smallest_launch(self) -> float:
        return self._planned.predicted if self._planned is not None else self._costs.mean("clip", 0, 1)

    def due(self) -> bool:
        return False

    def can_wait(self, now: float, seconds: float) -> bool:
        if seconds > UNNOTICED and (len(self._references) or not self._scheduler.all_playing):
            return False
        step = self._next_step(now)
        streams = () if step is None else (*(chunk.stream for chunk in step.prefills), *step.decodes)
        return not any(stream.waits_for_first_audio for stream in streams) and self.slack(now) > seconds

    def others_launched(self, seconds: float) -> None:
        """Playback decides what goes first, not what others launched."""

    def tick(self, now: float, allowance: float, *, must: bool = False) -> bool:
        if must:
            allowance = math.inf  # A planned step is launched whole.
        step = self._next_step(now)
        self._planned = None
        if self._reference_goes_first(step, now):
            return self._launch_reference(now, allowance)
        if step is None or step.predicted > allowance:
            return False
        start = max(now, self._in_flight.free_at)
        self._reference_share.count(step.predicted, served=0.0, waits=len(self._references) > 0)
        self._observe_slack(start)
        for chunk in step.prefills:
            if chunk.stream.phase is Phase.WAITING:
                self._requests.note_start(chunk.stream, now)
        self._scheduler.launch(step, start)
        try:
            with launch_errors():
                launch = self._launch(step)
        except LaunchError as error:
            log.exception("a step failed; its requests end")
            self._requests.abandon_all([*(chunk.stream for chunk in step.prefills), *step.decodes], error)
            return True
        self._scheduler.index_voice_pages(step)
        self._in_flight.add(launch, now, step.predicted)
        return True

    def _launch(self, step: Step) -> Launch:
        if step.prefills:
            chunks = [(chunk, self._requests.of(chunk.stream)) for chunk in step.prefills]
            return self._runner.launch_prefill(chunks, tail=step.tail)
        decodes = [self._requests.of(stream) for stream in step.decodes]
        return self._runner.launch_decode(decodes, step.decodes[0].solver_steps)

    def _reference_goes_first(self, step: Step | None, now: float) -> bool:
        """Encoding reference audio alternates with steps while the smallest slack covers a piece and the step after
        it, and gets its share of the time in any case."""
        if not len(self._references):
            return False
        if step is None:
            return True
        cost = self._costs.bound("clip", 0, 1)
        covered = self.slack(max(now, self._in_flight.free_at)) > cost
        self._reference_first = self._reference_share.owes(cost) or (not self._reference_first and covered)
        return self._reference_first

    def _launch_reference(self, now: float, allowance: float) -> bool:
        predicted = self._costs.mean("clip", 0, 1)
        if predicted > allowance:
            return False
        self._reference_share.count(predicted, served=1.0, waits=True)
        request_id = self._references.next_id
        start = mark(self._context.device)
        try:
            with launch_errors():
                patches = self._references.launch()
        except LaunchError as error:
            log.exception("encoding reference audio failed")
            self._references.abort(request_id)
            self._requests.failed.append(launch_failure(request_id, error))
            return True
        arrives = torch.zeros(1, device=self._context.device) if patches is None else patches
        launch = Launch([], Readback({"patches": arrives}, self._context.device), "clip", "eager")
        if patches is None:
            launch.timings = [Timing("clip", 0, 1, start, mark(self._context.device))]
        else:
            launch.reference_id = request_id
        self._in_flight.add(launch, now, predicted)
        return True

    def oldest_launch(self) -> float | None:
        return self._in_flight.oldest.launched_at if self._in_flight else None

    def wait(self) -> None:
        """Waits until the oldest results have arrived, or until it is time to choose the next step."""
        readback = self._in_flight.oldest.readback
        if self._in_flight.has_room and self._context.device.type == "cuda":
            while not readback.ready() and not self._in_flight.near_end(self._context.clock()):
                time.sleep(POLL)
            if not readback.ready() and self.has_work():
                time.sleep(POLL)  # The step may have to wait for another model that is due, so the loop must not spin.
                return
        readback.wait()

    def building(self) -> bool:
        return False

    def collect(self) -> Outputs:
        now = self._context.clock()
        encoded = []
        while launch := self._in_flight.pop(now):
            self._planned = None
            self._learn(launch, now)
            if launch.reference_id is not None:
                encoded.append(ReferenceEncoded(launch.reference_id, launch.readback.read()["patches"].copy()))
            replayed, rows = launch.route == "replay", len(launch.rows) + len(launch.prompts)
            for sequence in launch.prompts:
                sequence.stats.add(replayed, rows)
            for outcome in self._runner.outcomes(launch):
                outcome.sequence.stats.add(replayed, rows)
                self._requests.deliver(outcome, now)
        self._requests.send_due(now)
        deltas, failed = self._requests.drain()
        return Outputs(speech=deltas, encoded=tuple(encoded), failed=failed)

    def state(self) -> ModelState:
        scheduler = self._scheduler
        slack = scheduler.least_slack(self._context.clock())
        return ModelState(
            model=self.name,
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            pages_total=self._pages.num_pages - 1,
            pages_used=self._pages.num_used,
            pages_cached=self._pages.num_cached,
            slack=slack if math.isfinite(slack) else None,
        )

    # Results

    def _learn(self, launch: Launch, now: float) -> None:
        """Takes the measured costs of a launch whose results have arrived, and counts it in metrics."""
        observe, actual = self._context.observations.observe, 0.0
        for timing in launch.timings:
            seconds = seconds_between(timing.start, timing.end)
            self._costs.observe(timing.kind, timing.solver_steps, timing.size, seconds)
            part = "prefill" if timing.kind in REPLAYED_PREFILLS else timing.kind
            observe("speech_part_duration_seconds", seconds, model=self.name, part=part)
            if timing.kind != "vae" or not self._runner.codec.beside:
                actual += seconds
        observe(
            "step_duration_seconds", now - launch.launched_at, model=self.name, kind=launch.kind, route=launch.route
        )
        if actual and launch.predicted:
            observe("step_prediction_ratio", actual / launch.predicted, model=self.name, kind=launch.kind)

    def _observe_slack(self, start: float) -> None:
        slack = self._scheduler.least_slack(start)
        if math.isfinite(slack):
            self._context.observations.observe("audio_slack_seconds", slack, model=self.name)
