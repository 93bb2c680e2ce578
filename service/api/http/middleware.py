"""Around every request: request id, host check, admission, body limits, metrics and one access log line. Pure ASGI."""

from __future__ import annotations

import asyncio
import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import Awaitable, Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.http.admission import SMALL_BYTES, Admission
from service.api.http.auth import HostRule
from service.api.http.errors import CLIENT_CLOSED, ApiError, ResponseCut, refuse_socket, shutting_down
from service.api.http.record import RequestRecord
from service.api.tracing import Tracing, enter
from service.metrics.metrics import Metrics

log = logging.getLogger("reprise.access")

BODY_TIMEOUT = 60.0
"""Seconds for a client to send the body of a request."""
SWITCHED = 101
WEBSOCKET = "WEBSOCKET"
"""What stands for the method of one."""
REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


class RequestMiddleware:
    """The outermost middleware but CORS. endpoints: path -> endpoint; all other paths are endpoint "other", without
    admission."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        endpoints: Mapping[str, str],
        admission: Admission,
        metrics: Metrics,
        max_body: int,
        hosts: HostRule,
        tracing: Tracing | None = None,
    ) -> None:
        self._app = app
        self._endpoints = endpoints
        self._admission = admission
        self._metrics = metrics
        self._max_body = max_body
        self._hosts = hosts
        self._tracing = tracing
        self._active: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        endpoint = self._endpoints.get(scope["path"], "other")
        given = headers.get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(16)}"
        address = (scope.get("client") or ("",))[0]
        record = RequestRecord(request_id, endpoint, self._admission.ticket(endpoint), address)
        scope["reprise.record"] = record
        serve = self._websocket if scope["type"] == "websocket" else self._http
        if self._tracing is not None and endpoint != "other":
            method = scope.get("method", WEBSOCKET)
            record.trace = self._tracing.begin(method, scope["path"], headers, record.arrival)
        with enter(record.trace):
            await serve(scope, receive, send, headers, record)

    async def _http(self, scope: Scope, receive: Receive, send: Send, headers: Headers, record: RequestRecord) -> None:
        endpoint = record.endpoint
        status = 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = record.request_id
            await send(message)

        self._in_progress(endpoint, 1)
        try:
            body = self._bounded(receive, record, admitted=scope["method"] == "POST" and endpoint != "other")
            try:
                self._hosts.check(headers)
                self._admit(scope["method"], headers, record)
            except ApiError as error:
                await error.response()(scope, receive, answer)
            else:
                await self._app(scope, body, answer)
        except Exception:
            if not status:
                status = 500
            record.outcome = record.outcome or "error"
            raise
        except asyncio.CancelledError:
            # uvicorn cancels what is left at the end of a shutdown, as a request whose body has not come yet.
            if status or not await _sent_at_once(shutting_down().response()(scope, receive, answer)):
                record.outcome = "aborted"
                raise ResponseCut from None
        finally:
            record.ticket.release()
            self._in_progress(endpoint, -1)
            self._close(scope, record, status or CLIENT_CLOSED)

    async def _websocket(
        self, scope: Scope, receive: Receive, send: Send, headers: Headers, record: RequestRecord
    ) -> None:
        """A WebSocket. Its route takes admission itself, after the handshake."""
        status = CLIENT_CLOSED

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "websocket.accept":
                status = SWITCHED
                MutableHeaders(scope=message)["x-request-id"] = record.request_id
            elif message["type"] == "websocket.close" and status == CLIENT_CLOSED:
                status = 403
            elif message["type"] == "websocket.http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = record.request_id
            await send(message)

        self._in_progress(record.endpoint, 1)
        try:
            try:
                self._hosts.check(headers)
            except ApiError as error:
                await refuse_socket(error, scope, receive, answer)
            else:
                await self._app(scope, receive, answer)
        except Exception:
            record.outcome = "error"
            raise
        except asyncio.CancelledError:
            record.outcome = "aborted"
            if status != SWITCHED:
                raise
        finally:
            record.ticket.release()
            self._in_progress(record.endpoint, -1)
            self._close(scope, record, status)

    def _in_progress(self, endpoint: str, change: int) -> None:
        self._active[endpoint] += change
        self._metrics.observe("http_requests_in_progress", self._active[endpoint], endpoint=endpoint)

    def _admit(self, method: str, headers: Headers, record: RequestRecord) -> None:
        """Refuses by the headers, before any of the body is read. The request takes its place once the body has
        come."""
        if method != "POST":
            return
        if headers.get("content-encoding", "").strip().lower() not in ("", "identity"):
            message = "Content-Encoding: compressed request bodies are not supported."
            raise ApiError(415, message, code="unsupported_encoding")
        length = headers.get("content-length", "0")
        size = int(length) if length.isdecimal() else 0
        if size > self._max_body:
            raise self._too_large(size)
        record.ticket.body_size = SMALL_BYTES + 1 if "transfer-encoding" in headers else size
        if record.endpoint != "other":
            record.ticket.check()

    def _too_large(self, size: int) -> ApiError:
        message = f"The request body is too large: {size} bytes given, at most {self._max_body} allowed."
        return ApiError(413, message, code="body_too_large")

    def _bounded(self, receive: Receive, record: RequestRecord, *, admitted: bool) -> Receive:
        """`receive` that refuses bodies that are too large or too slow. admitted: the request takes its place when the
        body has come."""
        received, complete = 0, False
        deadline = time.monotonic() + BODY_TIMEOUT

        async def bounded() -> Message:
            nonlocal received, complete, deadline
            if complete:
                return await receive()
            try:
                async with asyncio.timeout(deadline - time.monotonic()):
                    message = await receive()
            except TimeoutError:
                raise ApiError(408, "Timed out reading the request body.", code="body_timeout") from None
            if message["type"] == "http.request":
                size = len(message.get("body", b""))
                received += size
                if received > self._max_body:
                    raise self._too_large(received)
                began = time.monotonic()
                if size:
                    await record.ticket.wait(size)
                deadline += time.monotonic() - began  # nothing was read meanwhile
                complete = not message.get("more_body", False)
                if complete:
                    record.ticket.body_size = 0
                    record.ticket.grow(1 if admitted else 0)
            return message

        return bounded

    def _close(self, scope: Scope, record: RequestRecord, status: int) -> None:
        duration = time.monotonic() - record.arrival
        if status == CLIENT_CLOSED:
            record.outcome = "aborted"
        outcome = record.end_with(status)
        labels = {"model": record.model, "endpoint": record.endpoint, "outcome": outcome}
        if record.endpoint != "other":
            self._metrics.observe("requests_total", 1, status=str(status), **labels)
            self._metrics.observe("request_duration_seconds", duration, **labels)
        if outcome == "aborted":
            self._metrics.observe("client_disconnects_total", 1, endpoint=record.endpoint)
        traced = {}
        if record.trace is not None:
            record.trace.end(status, record.model, outcome, {"request_id": record.request_id, **record.notes})
            traced = {"trace_id": record.trace.trace_id}
        probe = record.endpoint == "other" and (status < 400 or status == 503)
        log.log(
            logging.DEBUG if probe else logging.INFO,
            "%s %s %d",
            scope.get("method", WEBSOCKET),
            scope["path"][:100].encode("unicode_escape").decode(),
            status,
            extra={
                "request_id": record.request_id,
                "client": (scope.get("client") or ("",))[0][:64].encode("unicode_escape").decode(),
                "model": record.model,
                "outcome": outcome,
                "ms": round(duration * 1000, 1),
                **record.notes,
                **traced,
            },
        )


async def _sent_at_once(answer: Awaitable[None]) -> bool:
    """Sends an answer unless the client must first read what was sent before: nobody waits for it any more."""
    try:
        async with asyncio.timeout(0):
            await answer
    except (TimeoutError, asyncio.CancelledError):
        return False
    return True
