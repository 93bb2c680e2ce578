"""The API process's client of an engine: requests in, streams of deltas out, restarts after crashes and hangs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import KW_ONLY, dataclass, field

from models.interfaces import resizing
from service.api.engines.request_stream import (
    EngineError,
    EngineLost,
    Request,
    RequestGroup,
    RequestStream,
    count_rejection,
    observe_tokens,
)
from service.api.tracing import engine_trace
from service.link import messages
from service.link.engine_link import EngineLink
from service.link.messages import Command, EngineState, Outputs
from service.metrics.metrics import Metrics
from service.system.children import Silence

log = logging.getLogger(__name__)


class InFlightRequests:
    """The streams of one engine's requests, by id."""

    def __init__(self, metrics: Metrics) -> None:
        self.on_load: Callable[[int], None] = lambda in_flight: None
        """Called with the number of requests in flight when it has changed."""
        self.on_loss: Callable[[RequestStream, EngineError], bool] = lambda stream, error: False
        """Called for a request that fails before any of its answer has come; True: another engine has taken it over."""
        self._metrics = metrics
        self._streams: dict[str, RequestStream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[str]:
        return iter(self._streams)

    def find(self, request_id: str) -> RequestStream | None:
        return self._streams.get(request_id)

    def add(self, stream: RequestStream) -> None:
        self._streams[stream.request.request_id] = stream
        self.on_load(len(self._streams))

    def remove(self, request_id: str) -> RequestStream | None:
        """The stream of the request, which is not in flight any more; None if it was not."""
        stream = self._streams.pop(request_id, None)
        self.on_load(len(self._streams))
        return stream

    def take(self, outputs: Outputs) -> None:
        now = time.monotonic()
        if outputs.chat:
            observe_tokens(self._metrics, self._streams, outputs.chat, now)
        for delta in outputs.chat:
            self._deliver(delta, now, last=delta.finish_reason is not None)
        for audio in outputs.speech:
            self._deliver(audio, now, last=audio.finished)
        for encoded in outputs.encoded:
            self._deliver(encoded, now, last=True)
        for failed in outputs.failed:
            self._on_failed(failed)

    def _deliver(
        self, delta: messages.ChatDelta | messages.SpeechDelta | messages.ReferenceEncoded, now: float, *, last: bool
    ) -> None:
        stream = self._streams.get(delta.request_id)
        if stream is None:  # aborted while its last deltas were on their way
            return
        stream.last_delivery = now
        stream.deliver(delta, last=last)
        if last:
            self.remove(delta.request_id)

    def _on_failed(self, failed: messages.Failed) -> None:
        stream = self.remove(failed.request_id)
        if stream is None:
            return
        error = EngineError(failed.status, failed.code, failed.message, failed.field, failed.retry_after)
        if stream.last_delivery is not None or not self.on_loss(stream, error):
            count_rejection(self._metrics, stream.request, failed.code)
            stream.fail(error)

    def fail_all(self, error: EngineError) -> None:
        """Fail all requests, except for those that another engine takes over."""
        streams, self._streams = self._streams, {}
        self.on_load(0)
        for stream in streams.values():
            if stream.last_delivery is not None or not self.on_loss(stream, error):
                stream.fail(error)


BACKOFF_SECONDS = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
STEADY_SECONDS = 60.0
"""An engine that ran longer than this resets the back-off."""
STOPPED = "The engine stopped while the request was in progress; it is being restarted."


def unavailable(message: str, kind: type[EngineError] = EngineError) -> EngineError:
    return kind(503, "engine_unavailable", message, retry_after=2.0)


@dataclass(eq=False)
class EngineClient:
    """Start, watch and restart an engine, or follow one that another process starts.

    make_link: makes the link for each start; None: another process supervises the engine, see `attach`.
    name: of the engine, for the log.
    hang_timeout: seconds of `clock` without a message from a ready engine after which it is killed as hung.
    start_timeout: the same while it loads or captures.
    """

    make_link: Callable[[], EngineLink] | None
    metrics: Metrics
    _: KW_ONLY
    hang_timeout: float = 20.0
    start_timeout: float = 600.0
    clock: Callable[[], float] = time.monotonic
    name: str = "engine"
    state: EngineState | None = field(default=None, init=False)
    """The newest heartbeat since the engine was started."""
    on_state: Callable[[EngineState], None] = lambda state: None
    failure: str | None = field(default=None, init=False)
    """Set when the engine cannot be started and will not be tried again."""
    restarts: int = field(default=0, init=False)
    was_ready: bool = field(default=False, init=False)
    """Whether this engine or an earlier one was ready."""
    on_change: Callable[[], None] = lambda: None
    """Called when `phase` or `was_ready` may have changed."""
    _on_gpu: bool = field(default=False, init=False)
    _link: EngineLink | None = field(default=None, init=False)
    _task: asyncio.Task[str | None] | None = field(default=None, init=False)
    """Runs _supervise, or _run_once of an engine that is followed."""
    _changed: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _stopping: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._silence = Silence(self.clock)
        self.requests = InFlightRequests(self.metrics)

    # Life

    def start(self) -> None:
        if self.make_link is not None:
            self._task = asyncio.create_task(self._supervise(self.make_link), name=self.name)

    async def attach(self, link: EngineLink | None, restarts: int = 0) -> None:
        """Follow a start of an engine that another process supervises and has restarted so often, in place of the one
        before, which has ended. None: there is none now, but there was one that was ready."""
        self.restarts = restarts
        self.was_ready = self.was_ready or link is None or restarts > 0
        self._on_changed()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
            self._task = None
        if link is not None and not self._stopping:
            self._task = asyncio.create_task(self._run_once(link), name=self.name)

    @property
    def _supervises(self) -> bool:
        return self.make_link is not None

    def _on_changed(self) -> None:
        self._changed.set()
        self.on_change()

    def fail(self, reason: str) -> None:
        """Treat the engine as one that cannot be started, because this process cannot serve for `reason`."""
        self.failure = reason
        self._on_changed()

    async def wait_ready(self) -> None:
        """Wait until the engine accepts requests; EngineError if it cannot be started."""
        while not self.ready:
            if self.failure is not None:
                raise EngineError(503, "engine_failed", f"The {self.name} could not be started: {self.failure}.")
            self._changed.clear()
            await self._changed.wait()

    async def stop(self, grace: float = 10.0) -> None:
        """Stop the engine, or leave it to others; requests that are still running fail."""
        self._stopping = True
        for request_id in self.requests if not self._supervises else ():
            self.send(messages.Abort(request_id))
        self.requests.fail_all(unavailable("The server is shutting down."))
        if self._supervises and self._link is not None:
            self._link.send(messages.Stop())
        if self._task is None:
            return
        # An engine that loads or captures reads no commands, so it is killed at once.
        listens = self._supervises and self.ready
        _, running = await asyncio.wait({self._task}, timeout=grace if listens else 0.0)
        if running:
            if listens:
                log.warning("%s: did not stop within %.0f s; it is killed", self.name, grace)
            self._task.cancel()
            await asyncio.wait(running)

    @property
    def phase(self) -> str:
        """ "starting", "loading", "capturing", "ready", "down" or "failed"."""
        if self.failure is not None:
            return "failed"
        if self._link is None:
            return "down"
        return "starting" if self.state is None else self.state.phase

    @property
    def ready(self) -> bool:
        return self.phase == "ready"

    @property
    def alive(self) -> bool:
        """Whether the engine runs and its last heartbeat is recent enough for what it is doing."""
        return self._link is not None and self._silence.look() <= self._longest_silence()

    # Requests

    def submit(self, request: Request, group: RequestGroup | None = None) -> RequestStream:
        """Send a request to the engine, one of a group or one alone; EngineError (503) when it is not ready."""
        if not self.ready:
            raise unavailable(f"The engine is not ready ({self.phase}); retry in a moment.")
        trace = engine_trace(request.request_id)
        stream: RequestStream = RequestStream(request, self._abort, trace, group or RequestGroup())
        self.adopt(stream)
        return stream

    def adopt(self, stream: RequestStream) -> None:
        """Send a request, also one that was sent to another engine and not answered."""
        stream.abort = self._abort
        self.requests.add(stream)
        self.send(stream.request)

    def send(self, command: Command) -> None:
        """Send a command, such as one about a request that was submitted (SpeechAppend, Pause). It is lost while there
        is no engine."""
        if self._link is not None:
            self._link.send(command)

    def _abort(self, request_id: str) -> None:
        if self.requests.remove(request_id) is not None:
            self.send(messages.Abort(request_id))

    # Supervision

    async def _supervise(self, make_link: Callable[[], EngineLink]) -> None:
        attempt = 0
        while True:
            started = time.monotonic()
            ended = await self._run_once(make_link())
            if self._stopping:
                return
            if not self.was_ready:  # wait_ready raises and says why
                self.failure = ended
                self._on_changed()
                return
            log.error("%s: %s", self.name, ended)
            if time.monotonic() - started > STEADY_SECONDS:
                attempt = 0
            await asyncio.sleep(BACKOFF_SECONDS[min(attempt, len(BACKOFF_SECONDS) - 1)])
            attempt += 1
            self.restarts += 1
            self.metrics.observe("engine_restarts_total")
            log.warning("%s: restart %d", self.name, self.restarts)

    async def _run_once(self, link: EngineLink) -> str:
        """Run the engine once, from its start to its end; return how it ended."""
        self._link = link
        self._silence.end()
        watchdog = asyncio.create_task(self._watch(link), name="engine-watchdog") if self._supervises else None
        try:
            return await link.run(self._on_outputs)
        finally:
            if watchdog is not None:
                watchdog.cancel()
            self._link = None
            if self.state is not None and self._supervises:
                self.metrics.observe_end(self.state)
            self.state = None
            self.requests.fail_all(unavailable(STOPPED, EngineLost))
            self._on_changed()

    def _longest_silence(self) -> float:
        serves = self.state is not None and self.state.phase == "ready" and not self.state.occupied
        return self.hang_timeout if serves else self.start_timeout

    async def _watch(self, link: EngineLink) -> None:
        seconds = await self._silence.exceeds(self._longest_silence)
        log.error("%s: no sign of life for %.0f s; it is killed", self.name, seconds)
        link.kill()

    # Outputs

    def _on_outputs(self, outputs: Outputs) -> None:
        self._silence.end()
        self.requests.take(outputs)
        if outputs.state is not None:
            self._on_state(outputs.state)
        if outputs.observations:  # later, so that those who wait for the answers continue first
            asyncio.get_running_loop().call_soon(self.metrics.observe_events, outputs.observations)

    def _on_state(self, state: EngineState) -> None:
        changed = self.state is None or (self.state.phase, self.state.detail) != (state.phase, state.detail)
        self.state = state
        if state.phase == "ready":
            if self._on_gpu != bool(state.device_memory):
                self._on_gpu = bool(state.device_memory)
                resizing.leave_to_device(self._on_gpu)
            self.was_ready = True
        if self._supervises:
            self.metrics.observe_state(state)
        if changed:
            self._on_changed()
            self.on_state(state)
