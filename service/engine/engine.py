"""The loop that owns the GPU.

    commands -> workers -> one launch, chosen by the arbiter -> results that have been copied to the host -> Outputs

A launch never waits for results, and the loop waits for the oldest launch only when nothing else can be launched. So
the GPU has the next step queued while Python reads the results of the last one. start.py makes the engine and runs it.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import chain

from service.engine.arbiter import CPU_SHARE, Arbiter
from service.engine.core.worker import ModelWorker, StartPhases
from service.engine.memory import device_memory, device_name, process_usage
from service.graphs.observations import Observations
from service.graphs.pool import GraphPool
from service.graphs.runner import GraphRunner
from service.link.config import Channel
from service.link.messages import ChatRequest, Command, Control, EngineState, Failed, Outputs, Request, Stop

log = logging.getLogger(__name__)

HEARTBEAT = 0.5
"""Seconds between two states of the engine."""
EARLY_CAPTURE_SECONDS = 15.0
"""Seconds of captures before readiness, beyond those without which the first requests would be slow. For two models of
2B on an H200 they suffice for the whole list: its longest parts (plans of cuDNN, passes over large pictures, prefills
of speech) take 50 to 160 ms, for which later a request would have to wait."""
QUIET_BEFORE_CAPTURE = 0.25
"""Seconds without work before an idle engine does the next part of a capture or of a warm-up. A request that comes
meanwhile has to wait for the end of a warm-up's run, or of a replay."""
MISSES_BEFORE_CAPTURE = 32
"""A busy engine captures a bucket once this many calls ran eagerly because it was not captured yet."""
MISSES_BEFORE_PAUSE = 256
"""After this many misses a busy engine captures the bucket even if live listeners hear a gap."""
GATHERING = 0.18
"""Seconds for which a piece of live speech waits for those of other sessions."""
FEW, FEW_WITHIN = 4, 0.9
"""So many pieces in so many seconds do not wait."""
_BUILD_WAIT = 0.002
"""Seconds that an otherwise idle engine waits for commands while the matcher of a grammar is built."""


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
        """overlapped: the device computes while the host launches the next step. False on a CPU, where a launch has
        finished when it returns: its results are sent before the next one."""
        self.workers = {worker.name: worker for worker in workers}
        self._pool = pool
        self._observations = observations
        self._channel = channel
        self._overlapped = overlapped
        self._clock = clock
        self._arbiter = Arbiter(workers, fair_share=0.0 if overlapped else CPU_SHARE)
        self._received: list[Command] = []
        """Commands that came during a part of a capture."""
        self._refused: list[Failed] = []
        self._gathered: list[ChatRequest] = []
        """Pieces of live speech that wait for others since `_gathered_at`."""
        self._gathered_at = 0.0
        self._pieces = deque([-math.inf] * FEW, FEW)
        """When the last ones came."""
        self._phase = "capturing"
        self._stopped = False
        self._state_sent = float("-inf")
        self._busy_at = clock()
        self._may_capture = True
        """Whether a capture or a warm-up may be left: calls since the last look may have made a bucket worth it."""
        self._runners = [runner for worker in workers for runner in worker.graph_runners]
        self._device_name = device_name(pool.device)
        self._capture_seconds = 0.0
        """Duration of the last capture before readiness, or of the last part of one for a busy engine."""
        self._warming: Iterator[None] = iter(())
        """The remaining runs of the workers' warm-ups."""
        self._warmed: Callable[[], None] | None = None
        """Called once the warm-ups are done."""

    def capture_first(self, *, restarted: bool = False, warmed: Callable[[], None] = lambda: None) -> None:
        """Captures what must be captured before the first request, measures costs, and on a GPU warms up what may run
        eagerly and goes on capturing for EARLY_CAPTURE_SECONDS.

        restarted: the warm-up waits until the engine is idle, since its kernels are in Triton's cache, from which one
            that is needed sooner is loaded at its first launch.
        warmed: called once the warm-up is done.
        """
        phases = StartPhases(self._observations)
        on_gpu = self._pool.device.type == "cuda"
        self._warmed = warmed
        if on_gpu:
            self._warming = chain.from_iterable(worker.warm_up() for worker in self.workers.values())
        for worker in self.workers.values():
            with phases.timed("capture"):
                while self._timed(partial(_capture_next, worker.graph_runners, idle=False)):
                    self._send(self._clock(), detail=worker.name)
                worker.calibrate()
        if not (on_gpu and restarted):
            with phases.timed("warm_up") if on_gpu else nullcontext():
                deque(iter(self._warm_up_next, False), maxlen=0)
        if on_gpu and not restarted:
            with phases.timed("capture"):
                end = self._clock() + EARLY_CAPTURE_SECONDS
                while self._clock() < end and self._capture_part():
                    self._send(self._clock())
        self._phase = "ready"
        self._busy_at = self._clock()

    def run(self) -> None:
        """Calls `turn` until a Stop command comes."""
        while not self._stopped:
            self.turn()

    def turn(self) -> bool:
        """Receives, launches, collects and sends once. False when there was nothing to do."""
        self._receive(timeout=0.0)
        if self._gathered and self._clock() - self._gathered_at >= GATHERING:
            self._submit_gathered()
        for runner in self._runners:
            if runner.misses >= MISSES_BEFORE_CAPTURE:
                self._capture_missed(runner)
        now = self._clock()
        building = any(worker.building() for worker in self.workers.values())
        launched = self._launch(now)
        waited = not (launched and self._overlapped) and self._wait_for_oldest()
        self._send(self._clock(), hurried=waited and not launched)
        if launched or waited:
            self._busy_at = now
            self._may_capture = True
            return True
        if self._gathered:
            self._submit_gathered()
            return True
        if building:
            # What was built meanwhile can be launched at once.
            if any(worker.building() for worker in self.workers.values()):
                self._receive(timeout=_BUILD_WAIT)
            self._busy_at = now
            return True
        if now - self._busy_at >= QUIET_BEFORE_CAPTURE and self._may_capture:
            self._may_capture = self._occupied(self._capture_or_warm_up)
            return self._may_capture
        if not self._stopped:
            self._receive(timeout=QUIET_BEFORE_CAPTURE if self._may_capture else HEARTBEAT)
        return False

    def _gathers(self, worker: ModelWorker) -> bool:
        """Whether a piece of live speech waits, while another model computes, for those of other sessions: each alone
        would take as many steps of its time as all of them share. Few pieces would meet no others."""
        now, earlier = self._clock(), self._pieces[0]
        self._pieces.append(now)
        others = (other for other in self.workers.values() if other is not worker)
        computes = any(other.has_work() or other.oldest_launch() is not None for other in others)
        return computes and now - earlier < FEW_WITHIN

    def _submit_gathered(self) -> None:
        for request in self._gathered:
            self.workers[request.model].submit(request)
        self._gathered = []

    def _launch(self, now: float) -> bool:
        """Asks the workers in the arbiter's order until one launches; False if none does."""
        for candidate in self._arbiter.candidates(now):
            before = candidate.worker.backlog(now)
            if candidate.worker.tick(now, candidate.allowance, must=candidate.must):
                seconds = candidate.worker.backlog(now) - before
                if not self._overlapped and (elapsed := self._clock() - now) > 0:
                    seconds = elapsed
                self._arbiter.launched(candidate.worker, now, seconds)
                return True
        return False

    def _capture_missed(self, runner: GraphRunner) -> None:
        """Capture a part of the bucket that a busy engine misses most, once live listeners have enough audio for the
        pause."""
        now = self._clock()
        workers = self.workers.values()
        slack = min(worker.slack(now) for worker in workers) - sum(worker.backlog(now) for worker in workers)
        if slack < self._capture_seconds and runner.misses < MISSES_BEFORE_PAUSE:
            return
        while self._wait_for_oldest():
            self._send(self._clock())
        self._occupied(partial(self._timed, runner.capture_missed))

    def _capture_or_warm_up(self) -> bool:
        """Do one part of a capture, which a command interrupts, or, when none is wanted, one run of a warm-up; False
        when there is neither."""
        self._pool.arrived = self._has_arrived
        try:
            captured = self._capture_part()
        finally:
            self._pool.arrived = None
        return captured or self._warm_up_next()

    def _capture_part(self) -> bool:
        return _capture_next(self._runners, idle=True)

    def _warm_up_next(self) -> bool:
        """One run of a warm-up; False, after calling `warmed`, when none is left."""
        for _ in self._warming:
            return True
        if self._warmed is not None:
            self._warmed()
            self._warmed = None
        return False

    def _occupied(self, work: Callable[[], bool]) -> bool:
        """Runs work that may take longer than the hang timeout, and announces its start and end: this thread also sends
        the heartbeats, and a capture takes seconds on a busy CPU."""
        self._channel.send(Outputs(state=self.state(occupied=True)))
        try:
            return work()
        finally:
            self._channel.send(Outputs(state=self.state()))

    def _timed(self, capture: Callable[[], bool]) -> bool:
        """Runs `capture` and keeps its duration, if it captured anything."""
        started = self._clock()
        captured = capture()
        if captured:
            self._capture_seconds = self._clock() - started
        return captured

    def _wait_for_oldest(self) -> bool:
        """Waits for the oldest launch, whose results usually arrive first: all work but the speech codec runs on one
        stream. False when nothing is in flight."""
        launches = [(at, worker) for worker in self.workers.values() if (at := worker.oldest_launch()) is not None]
        if not launches:
            return False
        min(launches, key=lambda launch: launch[0])[1].wait()
        return True

    def _has_arrived(self) -> bool:
        """Whether a command has come, which the next turn handles."""
        self._received += self._channel.receive(0.0)
        return bool(self._received)

    def _receive(self, timeout: float) -> None:
        received, self._received = self._received, []
        for command in (*received, *self._channel.receive(timeout)):
            self._handle(command)

    def _handle(self, command: Command) -> None:
        if isinstance(command, Request):
            worker = self.workers.get(command.model)
            if worker is None:
                message = f"model {command.model!r} is not hosted here"
                self._refused.append(Failed(command.request_id, 404, "model_not_found", message, "model"))
            elif isinstance(command, ChatRequest) and command.live and self._gathers(worker):
                self._gathered_at = self._gathered_at if self._gathered else self._clock()
                self._gathered.append(command)
            else:
                worker.submit(command)
        elif isinstance(command, Control):
            self._gathered = [one for one in self._gathered if one.request_id != command.request_id]
            for worker in self.workers.values():
                worker.control(command)
        elif isinstance(command, Stop):
            self._stopped = True

    def _send(self, now: float, detail: str = "", *, hurried: bool = False) -> None:
        """Sends everything new in one message, with the state once per heartbeat. hurried: the GPU may be idle, so
        metric events wait until there are answers to send them with."""
        heartbeat = now - self._state_sent >= HEARTBEAT
        if heartbeat:
            for worker in self.workers.values():
                worker.fail_timed_out(now)
        parts = [worker.collect() for worker in self.workers.values()]
        answers = self._refused or any(part.chat or part.speech or part.encoded or part.failed for part in parts)
        observations = self._observations.drain() if answers or heartbeat or not hurried else ()
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
        if state or observations or answers:
            self._channel.send(outputs)

    def state(self, detail: str = "", *, occupied: bool = False) -> EngineState:
        """The state of now, for a heartbeat. detail, occupied: as in EngineState."""
        return EngineState(
            phase=self._phase,
            detail=detail,
            models=tuple(worker.state() for worker in self.workers.values()),
            graph_bytes=self._pool.num_bytes,
            captures_left=sum(runner.num_untried for runner in self._runners) + (self._warmed is not None),
            device_memory=device_memory(self._pool.device),
            device=self._device_name,
            occupied=occupied,
            process=process_usage(),
        )


def _capture_next(runners: Sequence[GraphRunner], *, idle: bool) -> bool:
    """Captures the next bucket, or while the engine idles a part of it; False when none is wanted."""
    return any(runner.capture_next(idle=idle) for runner in runners)
