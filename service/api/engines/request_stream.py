"""The API process's side of one request to the engine: a stream of deltas that ends or fails."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Generic, TypeVar, cast

import msgspec
from msgspec import UNSET, UnsetType

from service.api.tracing import EngineTrace
from service.link import messages
from service.link.messages import ChatDelta, ChatRequest, SpeechDelta
from service.metrics.metrics import Metrics


def observe_tokens(
    metrics: Metrics, streams: Mapping[str, RequestStream], deltas: Sequence[ChatDelta], now: float
) -> None:
    """TTFT and ITL of streams by request id, before their last delivery is set to `now`. Rows of a step mostly share
    model and gap, so equal observations are made together."""
    tokens: Counter[str] = Counter()
    gaps: Counter[tuple[str, float]] = Counter()
    for delta in deltas:
        stream = streams.get(delta.request_id)
        count = len(delta.token_ids)
        if stream is None or not count:
            continue
        model = stream.request.model
        tokens[model] += count
        if stream.last_delivery is None:
            metrics.observe("time_to_first_token_seconds", now - stream.request.arrival, model=model)
        else:
            gaps[model, (now - stream.last_delivery) / count] += count
    for model, count in tokens.items():
        metrics.observe("generated_tokens_total", count, model=model)
    for (model, gap), count in gaps.items():
        metrics.observe_often("inter_token_duration_seconds", gap, count, model=model)


def count_rejection(metrics: Metrics, request: Request, code: str) -> None:
    """Count queue timeouts, and full queues of chat; those of speech are counted in the engine."""
    endpoint = "chat" if isinstance(request, ChatRequest) else "speech"
    if code == "queue_timeout" or (code == "overloaded" and endpoint == "chat"):
        reason = "queue_full" if code == "overloaded" else code
        metrics.observe("admission_rejections_total", endpoint=endpoint, reason=reason)


class StepReport(msgspec.Struct, frozen=True):
    """total: steps that included the request, all choices together. replayed: those that replayed a captured graph; the
    others ran eagerly. batch_size: average number of rows of its steps, its own included. encoded_media: number of its
    pictures and videos that went through the vision encoder; the others were in a cache."""

    total: int
    replayed: int
    batch_size: float
    encoded_media: int


def step_report(counts: Sequence[messages.StepCounts]) -> StepReport | UnsetType:
    """The report for the choices of a request; UNSET before any has ended."""
    total = sum(one.steps for one in counts)
    if not total:
        return UNSET
    return StepReport(
        total,
        sum(one.replayed for one in counts),
        round(sum(one.rows for one in counts) / total, 2),
        sum(one.encoded_media for one in counts),
    )


Request = ChatRequest | messages.SpeechRequest | messages.EncodeReference
Delta = TypeVar("Delta", ChatDelta, SpeechDelta, messages.ReferenceEncoded)


@dataclass(eq=False)
class EngineError(Exception):
    """The engine did not answer a request. `status`: HTTP status for the client. `retry_after`: seconds."""

    status: int
    code: str
    message: str
    field: str | None = None
    retry_after: float | None = None

    def __str__(self) -> str:
        return self.message


class EngineLost(EngineError):
    """The engine ended while it was answering the request. Another one may answer it."""


MOST_ENGINES = 2
"""Engines that may have requests of a group: those may be what ends them."""


class RequestGroup:
    """Requests with the same prompt: the choices of a chat, or one request alone."""

    def __init__(self) -> None:
        self._requests = Counter[int]()
        """Number of its requests by index of the engine that has or had them. What an engine refused does not count."""
        self.closed: set[int] = set()
        """Engines that ended with requests of the group, or refused one."""

    def note_sent(self, engine: int) -> None:
        self._requests[engine] += 1

    def note_refused(self, engine: int) -> None:
        self._requests[engine] -= 1
        self.closed.add(engine)

    def may_have(self, engine: int) -> bool:
        """Whether an engine may get a request of the group."""
        engines = +self._requests
        return engine not in self.closed and (engine in engines or len(engines) < MOST_ENGINES)


@dataclass(eq=False)
class RequestStream(Generic[Delta]):
    """Deltas of one request, in order. Those of a chat that a reader has not taken yet are merged into one.

    Iteration ends after the last delta and raises EngineError when the request fails. `aclose` aborts a request that
    has not ended; use contextlib.aclosing. To see each delta as it arrives, set `on_update` and call `take` in it.
    """

    request: Request
    abort: Callable[[str], None]
    """Aborts the request of that id at the engine that has it."""
    trace: EngineTrace | None = None
    group: RequestGroup = field(default_factory=RequestGroup)
    last_delivery: float | None = None
    """time.monotonic() when the newest delta came from the engine."""
    on_update: Callable[[], None] | None = None
    """Called when deltas have come or the stream has ended. Must not raise."""
    error: EngineError | None = None
    """Why the request failed. A reader gets the deltas that came before it first."""
    engine: int | None = None
    """Index of the engine that has the request (engines.py)."""
    ended: bool = False
    _pending: list[Delta] = field(default_factory=list)
    _reader: asyncio.Future[None] | None = None
    """Done when there is something to read."""

    def note_sent(self, engine: int) -> None:
        self.engine = engine
        self.group.note_sent(engine)

    def __aiter__(self) -> RequestStream[Delta]:
        return self

    async def __anext__(self) -> Delta:
        while not self._pending:
            if self.error is not None:
                raise self.error
            if self.ended:
                raise StopAsyncIteration
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if len(self._pending) == 1 or not isinstance(self._pending[0], ChatDelta):
            return self._pending.pop(0)
        return cast(Delta, merge(cast(list[ChatDelta], self.take())))

    def take(self) -> list[Delta]:
        """The deltas since the last call, not merged."""
        taken, self._pending = self._pending, []
        return taken

    async def aclose(self) -> None:
        if not self.ended:
            self.ended = True
            self.abort(self.request.request_id)
            if self.trace is not None:
                self.trace.end("aborted")
        self._wake()

    def deliver(self, delta: Delta, *, last: bool) -> None:
        self._pending.append(delta)
        self.ended |= last
        if self.trace is not None:
            self.trace.note(delta)
            if last:
                self.trace.end()
        self._wake()

    def cut(self, last: Delta) -> None:
        """Abort a request that has not ended. Its reader gets the deltas that came before, then `last`."""
        if not self.ended:
            self.abort(self.request.request_id)
            self.deliver(last, last=True)

    def fail(self, error: EngineError) -> None:
        if isinstance(error, EngineLost) and self.engine is not None:
            self.group.closed.add(self.engine)
        self.error = error
        self.ended = True
        if self.trace is not None:
            self.trace.end(error.code)
        self._wake()

    def _wake(self) -> None:
        if self.on_update is not None:
            self.on_update()
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


async def answered(stream: RequestStream[Delta]) -> list[Delta]:
    """All deltas of a request."""
    async with aclosing(stream):
        return [delta async for delta in stream]


def merge(deltas: Sequence[ChatDelta]) -> ChatDelta:
    return msgspec.structs.replace(
        deltas[-1],
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        infos=tuple(info for delta in deltas for info in delta.infos),
        cached_tokens=max(delta.cached_tokens for delta in deltas),
        times=deltas[0].times,
        hidden=next((delta.hidden for delta in deltas if delta.hidden is not None), None),
    )
