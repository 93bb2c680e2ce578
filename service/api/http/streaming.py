"""Streamed responses, and work that is cancelled when its client disconnects."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from service.api.http.errors import ApiError, ClientLeft, ResponseCut, as_api_error
from service.api.http.middleware import record_of
from service.settings.settings import Settings

T = TypeVar("T")

KEEP_ALIVE = b": keep-alive\n\n"
KEEP_ALIVE_SECONDS = 10.0
DONE = b"data: [DONE]\n\n"
EVENT_STREAM = "text/event-stream; charset=utf-8"
MONITOR_DELAY = 0.2
"""Seconds until work is watched for disconnects, and a response monitored for these and timeouts: when many start at
once, their first chunks come first."""


def event(payload: Any, name: str = "") -> bytes:
    """One server-sent event of a msgspec struct."""
    data = b"data: " + msgspec.json.encode(payload) + b"\n\n"
    return f"event: {name}\n".encode() + data if name else data


def error_event(error: ApiError) -> bytes:
    """An error in the middle of a stream, in the form that OpenAI's clients recognise."""
    return b"data: " + error.body() + b"\n\n"


@asynccontextmanager
async def ended_early(
    receive: Receive, seconds: float | None = None
) -> AsyncGenerator[Callable[[type[Exception]], None]]:
    """Cancel the block when the client disconnects (ClientLeft), or after `seconds` (TimeoutError). What is
    yielded cancels it, too, and has it raise the given exception."""
    loop = asyncio.get_running_loop()
    reason: type[Exception] = TimeoutError
    watcher: asyncio.Task[None] | None = None

    def end(cause: type[Exception]) -> None:
        nonlocal reason
        reason = cause
        limit.reschedule(loop.time())

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        end(ClientLeft)

    def start_watcher() -> None:
        nonlocal watcher
        watcher = loop.create_task(watch())

    # A watcher from the beginning would take a short request several turns of the loop.
    timer = loop.call_later(MONITOR_DELAY, start_watcher)
    try:
        async with asyncio.timeout(seconds) as limit:
            yield end
    except TimeoutError:
        if not limit.expired():
            raise
        raise reason from None
    finally:
        timer.cancel()
        if watcher is not None:
            watcher.cancel()  # it only listens: no need to await it


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
    """The result of `work`, which is cancelled when the client disconnects (ClientLeft), or after `seconds`
    (TimeoutError). The body must have been read."""
    async with ended_early(request.receive, seconds):
        return await work


class LiveResponse(Response):
    """A streamed response. Its generator is closed when the client disconnects or stops reading.

    Nothing is sent before the first chunk, so that an earlier failure is an ordinary error response. After a later one,
    `on_error` makes the last chunk (server-sent events, with a comment after KEEP_ALIVE_SECONDS of silence), or the
    connection is closed within the body (plain bytes). timeout: seconds for the whole body. write_timeout: seconds for
    the transport to take a chunk.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[bytes],
        *,
        media_type: str,
        timeout: float,
        write_timeout: float,
        on_error: Callable[[ApiError], bytes] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.media_type = media_type
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no", **(headers or {})})
        self._chunks = chunks
        self._timeout = timeout
        self._write_timeout = write_timeout
        self._on_error = on_error
        self._started = False
        self._sending = False
        self._sent_at = time.monotonic()
        self._monitoring: asyncio.Task[None] | None = None
        self._commenting = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        record = record_of(scope)
        try:
            await self._stream(receive, send)
        except ClientLeft:
            record.outcome = "aborted"
        except ClientTimeout:
            record.outcome = "timeout"
            raise
        except Exception as error:
            answer = as_api_error(error)
            record.outcome = record.end_with(answer.status)
            if not self._started:
                await answer.response()(scope, receive, send)
            elif self._on_error is None:
                raise ResponseCut from error
            else:
                await self._send_last(send, self._on_error(answer))
        finally:
            await self._chunks.aclose()

    async def _stream(self, receive: Receive, send: Send) -> None:
        end: Callable[[type[Exception]], None]

        def start_monitor() -> None:
            self._monitoring = asyncio.create_task(self._monitor(send, end))

        timer = asyncio.get_running_loop().call_later(MONITOR_DELAY, start_monitor)
        try:
            # Nothing may wait between the last chunk and the end of this block: a server tells of a disconnect then.
            async with ended_early(receive, self._timeout) as end:
                async for chunk in self._chunks:
                    await self._send(send, chunk)
                await self._send(send, b"", more=False)
        finally:
            timer.cancel()
            if self._monitoring is not None:  # before an error is answered: what the monitor ends is over
                self._monitoring.cancel()
                await asyncio.gather(self._monitoring, return_exceptions=True)

    async def _monitor(self, send: Send, end: Callable[[type[Exception]], None]) -> None:
        """Send keep-alive comments, and end the stream when the client has read nothing for the write timeout. A
        timeout for each chunk would cost more than sending the chunk."""
        silence = KEEP_ALIVE_SECONDS if self._on_error else math.inf
        while True:
            passed = time.monotonic() - self._sent_at
            if self._sending and passed >= self._write_timeout:
                return end(ClientTimeout)
            if self._sending or passed < silence:
                pause = self._write_timeout - passed if self._sending else min(silence - passed, self._write_timeout)
                await asyncio.sleep(pause)
                continue
            try:
                async with self._commenting, asyncio.timeout(self._write_timeout):
                    await self._write(send, KEEP_ALIVE)
            except TimeoutError:
                return end(ClientTimeout)
            except ClientLeft:
                return end(ClientLeft)

    async def _send(self, send: Send, chunk: bytes, *, more: bool = True) -> None:
        self._sending = True
        if self._commenting.locked():
            async with self._commenting:
                pass
        await self._write(send, chunk, more=more)
        self._sending = False

    async def _send_last(self, send: Send, chunk: bytes) -> None:
        """Send the last chunk within a timeout of its own: the monitor may have stopped."""
        try:
            async with asyncio.timeout(self._write_timeout):
                await self._send(send, chunk, more=False)
        except TimeoutError:
            raise ClientTimeout from None

    async def _write(self, send: Send, chunk: bytes, *, more: bool = True) -> None:
        self._sent_at = time.monotonic()
        try:
            if not self._started:
                self._started = True
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await send({"type": "http.response.body", "body": chunk, "more_body": more})
        except OSError:
            raise ClientLeft from None


def event_stream(
    events: AsyncGenerator[bytes],
    settings: Settings,
    on_error: Callable[[ApiError], bytes] = error_event,
    *,
    timeout: float | None = None,
    headers: Mapping[str, str] | None = None,
) -> LiveResponse:
    """Server-sent events. timeout: seconds for all of them; None: of an answer, which ends by itself at
    request_timeout."""
    return LiveResponse(
        events,
        media_type=EVENT_STREAM,
        timeout=settings.request_timeout + settings.write_timeout if timeout is None else timeout,
        write_timeout=settings.write_timeout,
        on_error=on_error,
        headers=headers,
    )


class ClientTimeout(ResponseCut):
    """The client has read nothing for the write timeout."""
