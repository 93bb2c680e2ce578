"""The API process's side of one request to the engine: a stream of deltas that ends or fails."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar, cast
from weakref import WeakSet

import msgspec
import numpy as np
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


class EngineError(Exception):
    """The engine did not answer a request. `status`: HTTP status for the client. `retry_after`: seconds."""

    def __init__(
        self, status: int, code: str, message: str, field: str | None = None, retry_after: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.field = field
        self.retry_after = retry_after


class EngineLost(EngineError):
    """The engine ended while it was answering the request, and with it those of the same group that it had. Another one
    may answer it: the group may end one more."""


MOST_ENDS = 2
"""Engines that may end with the requests of a group before these are not tried again: they may be the cause."""


class RequestGroup:
    """Requests with the same prompt: the choices of a chat, or one request alone. What they cost is counted for all
    together, since each of them may be what ends an engine."""

    def __init__(self) -> None:
        self._streams = WeakSet[RequestStream]()  # They hold the group, and would otherwise live until a collection.
        self._ends: set[EngineLost] = set()
        """Each is what the engine's requests failed with, all of them."""

    @property
    def ends_left(self) -> int:
        """How many engines it may still end, and so how many may have requests of it at a time."""
        return MOST_ENDS - len(self._ends)

    def add(self, stream: RequestStream) -> None:
        self._streams.add(stream)

    def note_end(self, lost: EngineLost) -> None:
        self._ends.add(lost)

    def engines(self, without: RequestStream | None = None) -> set[int]:
        """Indexes of the engines that have requests of the group, not counting the stream `without`."""
        return {
            stream.engine
            for stream in self._streams
            if stream is not without and not stream.ended and stream.engine is not None
        }


@dataclass(eq=False)
class RequestStream(Generic[Delta]):
    """Deltas of one request, in order. Deltas that a reader has not taken yet are merged into one.

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
    tried: set[int] = field(default_factory=set)
    ended: bool = False
    _pending: list[Delta] = field(default_factory=list)
    _reader: asyncio.Future[None] | None = None
    """Done when there is something to read."""

    def __post_init__(self) -> None:
        self.group.add(self)

    def note_sent(self, engine: int) -> None:
        self.engine = engine
        self.tried.add(engine)

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
        merged, self._pending = merge(self._pending)
        return merged

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
            self.trace.deliver(delta, last=last)
        self._wake()

    def cut(self, last: Delta) -> None:
        """Abort a request that has not ended. Its reader gets the deltas that came before, then `last`."""
        if not self.ended:
            self.abort(self.request.request_id)
            self.deliver(last, last=True)

    def fail(self, error: EngineError) -> None:
        if isinstance(error, EngineLost):
            self.group.note_end(error)
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


def merge(deltas: list[Delta]) -> tuple[Delta, list[Delta]]:
    """Merge as many of the first deltas as one delta can hold; return it and the rest."""
    first, rest = deltas[0], deltas[1:]
    if not rest:
        return first, rest
    if isinstance(first, ChatDelta):
        chat = cast(list[ChatDelta], deltas)
        merged = msgspec.structs.replace(
            chat[-1],
            token_ids=tuple(token for delta in chat for token in delta.token_ids),
            infos=tuple(info for delta in chat for info in delta.infos),
            cached_tokens=max(delta.cached_tokens for delta in chat),
            times=first.times,
            hidden=next((delta.hidden for delta in chat if delta.hidden is not None), None),
        )
        return cast(Delta, merged), []
    if isinstance(first, SpeechDelta):
        speech = cast(list[SpeechDelta], deltas)
        count = next((n for n, delta in enumerate(speech, 1) if delta.segment_done or delta.finished), len(speech))
        merged_audio = msgspec.structs.replace(
            speech[count - 1],
            audio=np.concatenate([delta.audio for delta in speech[:count]]),
            segment=first.segment,
            truncated=any(delta.truncated for delta in speech[:count]),
            times=first.times,
        )
        return cast(Delta, merged_audio), deltas[count:]
    return first, rest
