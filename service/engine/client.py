"""The engine as the API process sees it: requests in, streams of deltas out, death and hangs noticed and repaired."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar, cast

import numpy as np

from service.engine.messages import (
    Abort,
    ChatDelta,
    ChatRequest,
    Command,
    Drain,
    EncodeReference,
    EngineState,
    Failed,
    Outputs,
    ReferenceEncoded,
    SpeechDelta,
    SpeechRequest,
    Stop,
)
from service.engine.supervisor import EngineExit, EngineLink
from service.metrics import Metrics

log = logging.getLogger(__name__)

Request = ChatRequest | SpeechRequest | EncodeReference
Delta = TypeVar("Delta", ChatDelta, SpeechDelta, ReferenceEncoded)

BACKOFF_SECONDS = (0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
STEADY_SECONDS = 60.0
"""A life longer than this starts the back-off anew."""
HEARTBEAT_CHECK_SECONDS = 0.5


class EngineError(Exception):
    """A request that the engine did not answer; `status` is the HTTP status that fits."""

    def __init__(
        self, status: int, code: str, message: str, field: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.field = field
        self.retry_after = retry_after


def _unavailable(message: str, retry_after: float = 2.0) -> EngineError:
    return EngineError(503, "engine_unavailable", message, retry_after=retry_after)


class RequestStream(Generic[Delta]):
    """Deltas of one request, in order. What has not been taken yet is merged into one delta.

    Iteration ends after the last delta and raises EngineError when the request fails. `aclose` aborts a request that
    has not ended; use contextlib.aclosing. Who has to see each delta when it comes sets `on_news` and takes them there.
    """

    def __init__(self, request: Request, abort: Callable[[str], None]) -> None:
        self.request = request
        self.last_delivery: float | None = None
        """time.monotonic() when the newest delta came from the engine."""
        self.on_news: Callable[[], None] | None = None
        """Called when there is something to take, or the stream has ended. Must not raise."""
        self.error: EngineError | None = None
        """What the request failed with, after the deltas that are still to be taken."""
        self._abort = abort
        self._pending: list[Delta] = []
        self._ended = False
        self._reader: asyncio.Future[None] | None = None
        """What a reader that has nothing to take waits for."""

    def __aiter__(self) -> RequestStream[Delta]:
        return self

    async def __anext__(self) -> Delta:
        while not self._pending:
            if self.error is not None:
                raise self.error
            if self._ended:
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        merged, self._pending = _merge(self._pending)
        return merged

    def take(self) -> list[Delta]:
        """What has come since, as it came."""
        taken, self._pending = self._pending, []
        return taken

    async def aclose(self) -> None:
        if not self._ended:
            self._ended = True
            self._abort(self.request.request_id)
        self._wake()

    @property
    def ended(self) -> bool:
        return self._ended

    def deliver(self, delta: Delta, *, last: bool) -> None:
        self._pending.append(delta)
        self._ended |= last
        self._wake()

    def fail(self, error: EngineError) -> None:
        self.error = error
        self._ended = True
        self._wake()

    def _wake(self) -> None:
        if self.on_news is not None:
            self.on_news()
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


def _merge(deltas: list[Delta]) -> tuple[Delta, list[Delta]]:
    """The longest run from the front that one delta can say, and the rest."""
    first, rest = deltas[0], deltas[1:]
    if not rest:
        return first, rest
    if isinstance(first, ChatDelta):
        chat = cast(list[ChatDelta], deltas)
        merged = ChatDelta(
            first.request_id,
            tuple(token for delta in chat for token in delta.token_ids),
            tuple(info for delta in chat for info in delta.infos),
            chat[-1].finish_reason,
            max(delta.cached_tokens for delta in chat),
        )
        return cast(Delta, merged), []
    if isinstance(first, SpeechDelta):
        speech = cast(list[SpeechDelta], deltas)
        count = next((n for n, delta in enumerate(speech, 1) if delta.segment_done or delta.finished), len(speech))
        last = speech[count - 1]
        merged_audio = SpeechDelta(
            first.request_id,
            np.concatenate([delta.audio for delta in speech[:count]]),
            first.segment,
            last.segment_done,
            last.finished,
            any(delta.truncated for delta in speech[:count]),
        )
        return cast(Delta, merged_audio), deltas[count:]
    return first, rest


class EngineClient:
    """Owns the engine's life. `make_link` makes a link for each start.

    hang_timeout: seconds without a message from a ready engine until it counts as hung and is killed.
    start_timeout: the same between two signs of life while it loads and captures.
    """

    def __init__(
        self,
        make_link: Callable[[], EngineLink],
        metrics: Metrics,
        *,
        hang_timeout: float = 20.0,
        start_timeout: float = 600.0,
    ) -> None:
        self.state: EngineState | None = None
        """The newest heartbeat of this life of the engine."""
        self.on_state: Callable[[EngineState], None] | None = None
        self.failure: EngineExit | None = None
        """Set when the engine cannot be started and will not be tried again."""
        self.restarts = 0
        self._make_link = make_link
        self._metrics = metrics
        self._hang_timeout = hang_timeout
        self._start_timeout = start_timeout
        self._link: EngineLink | None = None
        self._streams: dict[str, RequestStream] = {}
        self._supervisor: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._last_message = time.monotonic()
        self._stopping = False
        self._was_ready = False

    # Life

    def start(self) -> None:
        """Start the engine in the background."""
        self._supervisor = asyncio.create_task(self._supervise(), name="engine-supervisor")

    async def wait_ready(self) -> None:
        """Until the engine takes requests; EngineError when it cannot be started."""
        while not self.ready:
            if self.failure is not None:
                raise EngineError(503, "engine_failed", f"The engine could not be started: {self.failure.reason}.")
            self._changed.clear()
            await self._changed.wait()

    def drain(self) -> None:
        """Tell the engine to take no new requests."""
        self._send(Drain())

    async def stop(self, grace: float = 10.0) -> None:
        """Stop the engine; the requests that still run fail."""
        self._stopping = True
        self._fail_all(_unavailable("The server is shutting down."))
        self._send(Stop())
        if self._supervisor is None:
            return
        # One that loads or captures reads no commands, one that is down is not waited for.
        listens = self.phase in ("ready", "draining")
        _, running = await asyncio.wait({self._supervisor}, timeout=grace if listens else 0.0)
        if running:
            if listens:
                log.warning("the engine did not stop within %.0f s; it is killed", grace)
            self._supervisor.cancel()
            await asyncio.wait(running)

    @property
    def phase(self) -> str:
        """ "starting", "loading", "capturing", "ready", "draining", "down" or "failed"."""
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
        """The engine lives and has said so recently enough for what it is doing."""
        return self._link is not None and not self._silent()

    @property
    def in_flight(self) -> int:
        return len(self._streams)

    # Requests

    def submit(self, request: Request) -> RequestStream:
        """Hand a request over; EngineError (503) when the engine does not take any now."""
        if not self.ready:
            raise _unavailable(f"The engine is not ready ({self.phase}); retry in a moment.")
        stream: RequestStream = RequestStream(request, self._abort)
        self._streams[request.request_id] = stream
        self._send(request)
        return stream

    def send(self, command: Command) -> None:
        """A command about a request that was submitted (SpeechAppend, Pause)."""
        self._send(command)

    def _send(self, command: Command) -> None:
        if self._link is not None:
            self._link.send(command)

    def _abort(self, request_id: str) -> None:
        if self._streams.pop(request_id, None) is not None:
            self._send(Abort(request_id))

    # Supervision

    async def _supervise(self) -> None:
        attempt = 0
        while True:
            started = time.monotonic()
            exit = await self._live()
            if self._stopping:
                return
            if not self._was_ready:  # whoever waits for it says why
                self.failure = exit
                self._changed.set()
                return
            log.error("engine: %s", exit.reason)
            if time.monotonic() - started > STEADY_SECONDS:
                attempt = 0
            await asyncio.sleep(BACKOFF_SECONDS[min(attempt, len(BACKOFF_SECONDS) - 1)])
            attempt += 1
            self.restarts += 1
            self._metrics.observe("engine_restarts_total")
            log.warning("engine: restart %d", self.restarts)

    async def _live(self) -> EngineExit:
        link = self._link = self._make_link()
        self._last_message = time.monotonic()
        watchdog = asyncio.create_task(self._watch(link), name="engine-watchdog")
        try:
            return await link.run(self._on_outputs)
        finally:
            watchdog.cancel()
            self._link = None
            if self.state is not None:
                self._metrics.observe_end(self.state)
            self.state = None
            self._fail_all(_unavailable("The engine stopped while the request was in progress; it is being restarted."))
            self._changed.set()

    def _silent(self) -> bool:
        limit = self._hang_timeout if self._was_ready and self.ready else self._start_timeout
        return time.monotonic() - self._last_message > limit

    async def _watch(self, link: EngineLink) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_CHECK_SECONDS)
            if self._silent():
                log.error("engine: no sign of life for %.0f s; it is killed", time.monotonic() - self._last_message)
                link.kill()
                return

    def _fail_all(self, error: EngineError) -> None:
        streams, self._streams = self._streams, {}
        for stream in streams.values():
            stream.fail(error)

    # Outputs

    def _on_outputs(self, outputs: Outputs) -> None:
        now = self._last_message = time.monotonic()
        for event in outputs.observations:
            self._metrics.observe_event(event)
        if outputs.chat:
            self._observe_tokens(outputs.chat, now)
        for delta in outputs.chat:
            self._deliver(delta, now, last=delta.finish_reason is not None)
        for audio in outputs.speech:
            self._deliver(audio, now, last=audio.finished)
        for encoded in outputs.encoded:
            self._deliver(encoded, now, last=True)
        for failed in outputs.failed:
            self._on_failed(failed)
        if outputs.state is not None:
            self._on_state(outputs.state)

    def _deliver(self, delta: ChatDelta | SpeechDelta | ReferenceEncoded, now: float, *, last: bool) -> None:
        stream = self._streams.get(delta.request_id)
        if stream is None:  # aborted: its last deltas were under way
            return
        stream.last_delivery = now
        stream.deliver(delta, last=last)
        if last:
            del self._streams[delta.request_id]

    def _observe_tokens(self, deltas: Sequence[ChatDelta], now: float) -> None:
        """Rows of a step share their model and mostly the time of the step before: what is equal is observed once."""
        tokens: Counter[str] = Counter()
        gaps: Counter[tuple[str, float]] = Counter()
        for delta in deltas:
            stream = self._streams.get(delta.request_id)
            count = len(delta.token_ids)
            if stream is None or not count:
                continue
            model = stream.request.model
            tokens[model] += count
            if stream.last_delivery is None:
                self._metrics.observe("time_to_first_token_seconds", now - stream.request.arrival, model=model)
            else:
                gaps[model, (now - stream.last_delivery) / count] += count
        for model, count in tokens.items():
            self._metrics.observe("generated_tokens_total", count, model=model)
        for (model, gap), count in gaps.items():
            self._metrics.observe_often("inter_token_duration_seconds", gap, count, model=model)

    def _on_failed(self, failed: Failed) -> None:
        stream = self._streams.pop(failed.request_id, None)
        if stream is not None:
            self._count_rejection(stream.request, failed.code)
            stream.fail(EngineError(failed.status, failed.code, failed.message, failed.field, failed.retry_after))

    def _count_rejection(self, request: Request, code: str) -> None:
        """Full queues of speech are counted where they are predicted."""
        endpoint = "chat" if isinstance(request, ChatRequest) else "speech"
        if code == "queue_timeout" or (code == "overloaded" and endpoint == "chat"):
            reason = "queue_full" if code == "overloaded" else code
            self._metrics.observe("admission_rejections_total", endpoint=endpoint, reason=reason)

    def _on_state(self, state: EngineState) -> None:
        changed = self.state is None or (self.state.phase, self.state.detail) != (state.phase, state.detail)
        self.state = state
        self._was_ready |= state.phase == "ready"
        self._metrics.observe_state(state)
        if changed:
            self._changed.set()
            if self.on_state is not None:
                self.on_state(state)
