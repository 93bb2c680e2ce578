"""The loop that owns the GPU.

    commands -> workers -> one launch, ordered by the arbiter -> results that have arrived -> Outputs

A launch never waits for results; the loop waits for the oldest launch only when nothing else can be launched, so the
GPU has the next step queued while Python reads the last one.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from models.registry import family_of, resolve
from service.engine.arbiter import Arbiter
from service.engine.compilations import Compilations
from service.engine.config import Channel, ConfigurationError, EngineConfig, ModelConfig
from service.engine.memory import device_memory, device_name, size_pages
from service.engine.messages import (
    Abort,
    ChatRequest,
    Command,
    Drain,
    EncodeReference,
    EngineState,
    Failed,
    Outputs,
    Pause,
    SpeechAppend,
    SpeechRequest,
    Stop,
)
from service.engine.rehearsal import mark_of, rehearse
from service.engine.worker import ModelWorker, WorkerContext
from service.graphs.accounting import Observations
from service.graphs.pool import GraphPool
from service.graphs.runner import GraphRunner

log = logging.getLogger(__name__)

HEARTBEAT = 0.5
"""Seconds between states while nothing else happens."""
QUIET_BEFORE_CAPTURE = 0.25
"""Seconds without work before an idle engine captures: a capture delays a request that comes while it runs."""

MISSES_BEFORE_CAPTURE = 32
"""Eager calls for want of one recording after which a busy engine makes it."""
MISSES_BEFORE_PAUSE = 256
"""After so many it does so even if listeners hear the pause."""

WORKERS = {"chat": "service.engine.chat:create_worker", "speech": "service.engine.speech.worker:create_worker"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Engine:
    """Takes commands from a channel, steps the workers and sends what they produce."""

    def __init__(
        self,
        workers: Sequence[ModelWorker],
        pool: GraphPool,
        observations: Observations,
        channel: Channel,
        *,
        overlapped: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """overlapped: the device computes while the host launches ahead. Otherwise, as on a CPU, a launch has run when
        it returns, and its results are sent before the next."""
        self.workers = {worker.name: worker for worker in workers}
        self._pool = pool
        self._observations = observations
        self._channel = channel
        self._overlapped = overlapped
        self._clock = clock
        self._arbiter = Arbiter(workers)
        self._refused: list[Failed] = []
        self._phase = "capturing"
        self._stopped = False
        self._state_sent = float("-inf")
        self._busy_at = clock()
        self._may_capture = True
        self._runners = [runner for worker in workers for runner in worker.graph_runners]
        self._device_name = device_name(pool.device)
        self._capture_seconds = 0.0
        """What the last capture took."""

    def capture_first(self) -> None:
        """Makes the recordings that must exist before the first request, and runs what may run without one."""
        for worker in self.workers.values():
            while self._timed(partial(worker.capture_next, idle=False)):
                self._send(self._clock(), detail=worker.name)
            if self._pool.device.type == "cuda":
                worker.warm_up()
        self._phase = "ready"
        self._busy_at = self._clock()

    def run(self) -> None:
        """Turns until a Stop command comes."""
        while not self._stopped:
            self.turn()

    def turn(self) -> bool:
        """Receives, launches, collects and sends once. False when there was nothing to do."""
        self._receive(timeout=0.0)
        for runner in self._runners:
            if runner.misses >= MISSES_BEFORE_CAPTURE:
                self._capture_missed(runner)
        now = self._clock()
        launched = self._arbiter.launch(now)
        waited = not (launched and self._overlapped) and self._wait_for_oldest()
        self._send(self._clock())
        if launched or waited:
            self._busy_at = now
            self._may_capture = True
            return True
        if now - self._busy_at >= QUIET_BEFORE_CAPTURE and self._may_capture:
            captures = (partial(worker.capture_next, idle=True) for worker in self.workers.values())
            self._may_capture = any(self._timed(capture) for capture in captures)
            return self._may_capture
        if not self._stopped:
            self._receive(timeout=QUIET_BEFORE_CAPTURE if self._may_capture else HEARTBEAT)
        return False

    def _capture_missed(self, runner: GraphRunner) -> None:
        """Makes the recording that a busy engine misses, once listeners have enough audio for the pause."""
        now = self._clock()
        workers = self.workers.values()
        slack = min(worker.slack(now) for worker in workers) - sum(worker.backlog(now) for worker in workers)
        if slack < self._capture_seconds and runner.misses < MISSES_BEFORE_PAUSE:
            return
        while self._wait_for_oldest():
            self._send(self._clock())
        self._timed(runner.capture_missed)

    def _timed(self, capture: Callable[[], bool]) -> bool:
        started = self._clock()
        captured = capture()
        if captured:
            self._capture_seconds = self._clock() - started
        return captured

    def _wait_for_oldest(self) -> bool:
        """Waits for the results that arrive next; all workers launch on one stream, so that is the oldest launch."""
        launches = [(at, worker) for worker in self.workers.values() if (at := worker.oldest_launch()) is not None]
        if not launches:
            return False
        min(launches, key=lambda launch: launch[0])[1].wait()
        return True

    def _receive(self, timeout: float) -> None:
        for command in self._channel.receive(timeout):
            self._handle(command)

    def _handle(self, command: Command) -> None:
        match command:
            case ChatRequest() | SpeechRequest() | EncodeReference():
                worker = self.workers.get(command.model)
                if worker is None:
                    message = f"model {command.model!r} is not hosted here"
                    self._refused.append(Failed(command.request_id, 404, "model_not_found", message, "model"))
                elif self._phase == "draining":
                    message = "the server is shutting down"
                    self._refused.append(Failed(command.request_id, 503, "draining", message, retry_after=5.0))
                else:
                    worker.submit(command)
            case SpeechAppend() | Abort() | Pause():
                for worker in self.workers.values():
                    worker.control(command)
            case Drain():
                self._phase = "draining"
            case Stop():
                self._stopped = True

    def _send(self, now: float, detail: str = "") -> None:
        """Everything new in one message; the state with it once per heartbeat."""
        heartbeat = now - self._state_sent >= HEARTBEAT
        if heartbeat:
            for worker in self.workers.values():
                worker.end_waits(now)
        parts = [worker.collect() for worker in self.workers.values()]
        observations = self._observations.drain()
        state = None
        if heartbeat:
            state = self.state(detail)
            self._state_sent = now
        outputs = Outputs(
            chat=tuple(delta for part in parts for delta in part.chat),
            speech=tuple(delta for part in parts for delta in part.speech),
            encoded=tuple(answer for part in parts for answer in part.encoded),
            failed=(*self._refused, *(failure for part in parts for failure in part.failed)),
            observations=observations,
            state=state,
        )
        self._refused = []
        if state or observations or outputs.chat or outputs.speech or outputs.encoded or outputs.failed:
            self._channel.send(outputs)

    def state(self, detail: str = "") -> EngineState:
        models = tuple(worker.state() for worker in self.workers.values())
        memory = device_memory(self._pool.device)
        return EngineState(self._phase, detail, models, self._pool.num_bytes, memory, self._device_name)


def serve(config: EngineConfig, channel: Channel) -> None:
    """Loads, captures and runs until Stop: the engine process's whole life."""
    device = resolve_device(config)
    observations = Observations()
    compilations = Compilations(observations)
    with torch.inference_mode(), engine_stream(device), compilations.counted(device):
        engine = build_engine(config, channel, device, observations)
        engine.capture_first()
        compilations.serve()
        # What is alive now lives as long as the process: the collector need not look at it again in a step.
        gc.collect()
        gc.freeze()
        engine.run()


def build_engine(config: EngineConfig, channel: Channel, device: torch.device, observations: Observations) -> Engine:
    """Loads the models and sizes memory. The caller holds the engine's stream and inference mode."""
    pool = GraphPool(device, config.graph_memory_bytes)
    workers = []
    for model in config.models:
        channel.send(Outputs(state=EngineState("loading", model.name, (), 0, device=device_name(device))))
        started = time.monotonic()
        workers.append(load_worker(config, model, device, pool, observations))
        observations.observe("model_load_duration_seconds", time.monotonic() - started, model=model.name)
    for name, pages in size_pages(config, workers, device).items():
        next(worker for worker in workers if worker.name == name).allocate(pages)
    return Engine(workers, pool, observations, channel, overlapped=device.type == "cuda")


def load_worker(
    config: EngineConfig, model: ModelConfig, device: torch.device, pool: GraphPool, observations: Observations
) -> ModelWorker:
    directory = Path(model.directory)
    family = family_of(directory)
    default = torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype = DTYPES.get(model.dtype, default)
    processor = resolve(family.processor)(directory)
    network = resolve(family.model)(directory, device, dtype, model.load_format)
    create = partial(resolve(WORKERS[family.kind]), model.name, processor, network)
    context = WorkerContext(config, device, dtype, pool, observations, time.monotonic)
    if device.type == "cuda" and not (mark := mark_of(directory, dtype, config, device_name(device))).exists():
        apart = replace(context, pool=GraphPool(device, config.graph_memory_bytes), observations=Observations())
        rehearse(create(apart), mark)
        gc.collect()
        torch.cuda.empty_cache()
    worker: ModelWorker = create(context)
    return worker


def resolve_device(config: EngineConfig) -> torch.device:
    """auto: the GPU when there is one. ConfigurationError when CUDA is wanted and cannot be had."""
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ConfigurationError("device: torch finds no CUDA device; `reprise doctor` says what is missing")
    use_cuda = has_cuda and config.device != "cpu"
    return torch.device("cuda", torch.cuda.current_device()) if use_cuda else torch.device("cpu")


def engine_stream(device: torch.device) -> AbstractContextManager[object]:
    """A stream of the engine's own: graphs cannot be captured on the default one. Steps come before what runs beside
    them on other streams, the codec of speech."""
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device, priority=-1))
