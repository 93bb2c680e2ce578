"""Answers that are made while they are sent, and work that ends when its client leaves."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.api.errors import ApiError, as_api_error
from service.api.record import record_of

T = TypeVar("T")

KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"
EVENT_STREAM = "text/event-stream; charset=utf-8"
UNATTENDED = 0.2
"""Seconds in which nobody looks after an answer: many that begin at once have their first pieces the sooner."""


class ClientLeft(Exception):
    """The client closed the connection before its answer."""


def event(payload: Any) -> bytes:
    """One server-sent event of a msgspec struct."""
    return b"data: " + msgspec.json.encode(payload) + b"\n\n"


def error_event(error: ApiError) -> bytes:
    """The one shape that OpenAI's clients see as a failure in mid-stream."""
    return b"data: " + error.body() + b"\n\n"


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves (ClientLeft). The body must have been read."""
    worker = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnect(request.receive))
    try:
        await asyncio.wait({worker, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not worker.done():
            raise ClientLeft
        return worker.result()
    finally:
        watcher.cancel()  # it only listens: nobody has to wait until it has ended
        if not worker.done():
            worker.cancel()
            await asyncio.gather(worker, return_exceptions=True)


async def _disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class LiveResponse(Response):
    """An answer whose body is generated. The generator is closed when the client leaves or stops reading.

    Nothing is sent before the first piece exists, so that a failure up to there is an ordinary error answer; after
    it, `on_error` makes the last piece (server-sent events), or the connection is cut (plain bytes), so that a client
    can tell a failed body from a complete one. keep_alive: (seconds of silence, what is then sent, the headers before
    it if need be). timeout: seconds for the whole body. write_timeout: seconds for the transport to take a piece.
    """

    def __init__(
        self,
        pieces: AsyncGenerator[bytes],
        *,
        media_type: str,
        timeout: float,
        write_timeout: float,
        keep_alive: tuple[float, bytes] | None = None,
        on_error: Callable[[ApiError], bytes] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.media_type = media_type
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        self._pieces = pieces
        self._timeout = timeout
        self._write_timeout = write_timeout
        self._keep_alive = keep_alive
        self._on_error = on_error
        self._started = False
        self._sending = False
        self._sent_at = time.monotonic()
        self._timer: asyncio.TimerHandle | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._breaker: asyncio.Task[None] | None = None
        self._comment = asyncio.Lock()
        """Held while a keep-alive is sent."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = record_of(scope)
        try:
            await self._stream(receive, send)
        except ClientLeft:
            record.outcome = "aborted"
        except Stalled:
            record.outcome = "timeout"
            raise
        except Exception as error:
            answer = as_api_error(error)
            record.outcome = record.end_with(answer.status)
            if not self._started:
                await answer.response()(scope, receive, send)
            elif self._on_error is None:
                raise BodyCut from error
            else:
                await self._send_last(send, self._on_error(answer))
        finally:
            await self._end_attendance()
            await self._pieces.aclose()

    async def _stream(self, receive: Receive, send: Send) -> None:
        reason: type[Exception] = TimeoutError
        try:
            async with asyncio.timeout(self._timeout) as limit:

                def end(cause: type[Exception]) -> None:
                    nonlocal reason
                    reason = cause
                    limit.reschedule(asyncio.get_running_loop().time())

                async def watch() -> None:
                    await _disconnect(receive)
                    end(ClientLeft)

                def begin_attendance() -> None:
                    self._watcher = asyncio.create_task(watch())
                    self._attend(send, end)

                self._timer = asyncio.get_running_loop().call_later(UNATTENDED, begin_attendance)
                async for piece in self._pieces:
                    await self._send(send, piece)
                await self._send(send, b"", more=False)
        except TimeoutError:
            if not limit.expired():
                raise
            raise reason from None

    def _attend(self, send: Send, end: Callable[[type[Exception]], None]) -> None:
        """Breaks the silence of the stream; ends it when the client has taken nothing for the write timeout.

        One timer that looks now and then, since setting one for each piece would cost more than sending it.
        """
        silence, comment = self._keep_alive or (math.inf, b"")
        passed = time.monotonic() - self._sent_at
        if self._sending and passed >= self._write_timeout:
            end(Stalled)
        elif not self._sending and passed >= silence:
            self._breaker = asyncio.create_task(self._break_silence(send, comment, end))
        else:
            pause = self._write_timeout - passed if self._sending else min(silence - passed, self._write_timeout)
            self._timer = asyncio.get_running_loop().call_later(pause, self._attend, send, end)

    async def _break_silence(self, send: Send, comment: bytes, end: Callable[[type[Exception]], None]) -> None:
        if not self._sending:
            try:
                async with self._comment, asyncio.timeout(self._write_timeout):
                    await self._write(send, comment)
            except TimeoutError:
                end(Stalled)
                return
            except ClientLeft:
                end(ClientLeft)
                return
        self._attend(send, end)

    async def _end_attendance(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()  # it only listens: nobody has to wait until it has ended
        if self._breaker is not None:
            self._breaker.cancel()
            await asyncio.gather(self._breaker, return_exceptions=True)

    async def _send(self, send: Send, piece: bytes, *, more: bool = True) -> None:
        self._sending = True
        if self._comment.locked():
            async with self._comment:
                pass
        await self._write(send, piece, more=more)
        self._sending = False

    async def _send_last(self, send: Send, piece: bytes) -> None:
        """After the attendance may have ended."""
        try:
            async with asyncio.timeout(self._write_timeout):
                await self._send(send, piece, more=False)
        except TimeoutError:
            raise Stalled from None

    async def _write(self, send: Send, piece: bytes, *, more: bool = True) -> None:
        self._sent_at = time.monotonic()
        try:
            if not self._started:
                self._started = True
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": piece, "more_body": more})
        except OSError:
            raise ClientLeft from None


class Stalled(Exception):
    """The client has taken nothing for the write timeout; the connection is closed."""


class BodyCut(Exception):
    """A body of plain bytes failed; the connection is closed before the body's end."""
