"""Around every request: request id, host check, admission, body limits, errors, metrics and one access log line."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import secrets
import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Literal

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.api.http.admission import SMALL_BYTES, Admission, Ticket
from service.api.http.errors import CLIENT_CLOSED, ApiError, ClientLeft, as_api_error
from service.api.tracing import RequestTrace, Tracing, enter
from service.metrics.metrics import Metrics

Outcome = Literal["ok", "client_error", "aborted", "timeout", "overloaded", "error"]


@dataclass
class RequestRecord:
    request_id: str
    endpoint: str
    ticket: Ticket
    client: str = ""
    """Who sent it, for code in which clients take turns: the address, or the digest of the API key if keys are
    required."""
    arrival: float = field(default_factory=time.monotonic)
    model: str = "unknown"
    outcome: Outcome | None = None
    """Set if the request ends otherwise than its HTTP status says, as a stream may."""
    trace: RequestTrace | None = None
    notes: dict[str, object] = field(default_factory=dict)
    """Further fields of the access log line."""

    def end_with(self, status: int) -> Outcome:
        """The outcome for a response status."""
        if self.outcome is not None:
            return self.outcome
        if status in (408, 504):
            return "timeout"
        if status == 503:
            return "overloaded"
        return "ok" if status < 400 else "client_error" if status < 500 else "error"


def record_of(scope: Scope) -> RequestRecord:
    record = scope["reprise.record"]
    assert isinstance(record, RequestRecord)
    return record


log = logging.getLogger("reprise.access")

BODY_TIMEOUT = 60.0
"""Seconds for a client to send the body of a request."""
SWITCHED = 101
WEBSOCKET = "WEBSOCKET"
"""What stands for the method of one."""
REQUEST_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")


@dataclass(eq=False)
class RequestMiddleware:
    """The outermost middleware but CORS. endpoints: path -> endpoint; all other paths are endpoint "other", without
    admission."""

    app: ASGIApp
    endpoints: Mapping[str, str]
    admission: Admission
    metrics: Metrics
    max_body: int
    guards: Guards
    tracing: Tracing | None = None
    _active: Counter[str] = field(default_factory=Counter)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        endpoint = self.endpoints.get(scope["path"], "other")
        given = headers.get("x-request-id", "")
        request_id = given if REQUEST_ID.fullmatch(given) else f"req_{secrets.token_hex(16)}"
        address = (scope.get("client") or ("",))[0]
        record = RequestRecord(request_id, endpoint, self.admission.ticket(endpoint), address)
        scope["reprise.record"] = record
        if self.tracing is not None and endpoint != "other":
            method = scope.get("method", WEBSOCKET)
            record.trace = self.tracing.begin(method, scope["path"], headers, record.arrival)
        enter(record.trace)
        await self._serve(scope, receive, send, headers, record)

    async def _serve(self, scope: Scope, receive: Receive, send: Send, headers: Headers, record: RequestRecord) -> None:
        """Serve a request, or a WebSocket, whose route takes admission itself after the handshake."""
        is_socket, status = scope["type"] == "websocket", 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] in ("http.response.start", "websocket.accept", "websocket.http.response.start"):
                status = message.get("status", SWITCHED)
                MutableHeaders(scope=message)["x-request-id"] = record.request_id
            await send(message)

        self._in_progress(record.endpoint, 1)
        try:
            self.guards.check(scope, headers, record)
            if not is_socket:
                self._admit(scope["method"], headers, record)
                receive = self._bounded(receive, record, scope["method"])
            await self.app(scope, receive, answer)
        except (ClientDisconnect, ClientLeft):
            pass  # nobody is left to be answered
        except asyncio.CancelledError:
            # uvicorn cancels what is left at the end of a shutdown, as a request whose body has not come yet.
            record.outcome = "aborted"
            if status != SWITCHED:
                raise
        except Exception as error:
            if status:  # the response has begun
                record.outcome = record.outcome or "error"
                raise
            await as_api_error(error).respond(scope, receive, answer)
        finally:
            record.ticket.release()
            self._in_progress(record.endpoint, -1)
            self._close(scope, record, status or CLIENT_CLOSED)

    def _in_progress(self, endpoint: str, change: int) -> None:
        self._active[endpoint] += change
        self.metrics.observe("http_requests_in_progress", self._active[endpoint], endpoint=endpoint)

    def _admit(self, method: str, headers: Headers, record: RequestRecord) -> None:
        """Refuse by the headers, before any of the body is read. The request takes its place once the body has
        come."""
        if method != "POST":
            return
        if headers.get("content-encoding", "").strip().lower() not in ("", "identity"):
            message = "Content-Encoding: compressed request bodies are not supported."
            raise ApiError(415, message, code="unsupported_encoding")
        length = headers.get("content-length", "0")
        size = int(length) if length.isdecimal() else 0
        if size > self.max_body:
            raise self._too_large(size)
        record.ticket.body_size = SMALL_BYTES + 1 if "transfer-encoding" in headers else size
        if record.endpoint != "other":
            record.ticket.check()

    def _too_large(self, size: int) -> ApiError:
        message = f"The request body is too large: {size} bytes given, at most {self.max_body} allowed."
        return ApiError(413, message, code="body_too_large")

    def _bounded(self, receive: Receive, record: RequestRecord, method: str) -> Receive:
        """`receive` that refuses bodies that are too large or too slow. A request takes its place when its body has
        come."""
        received, complete = 0, False
        admitted = method == "POST" and record.endpoint != "other"
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
                if received > self.max_body:
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
            self.metrics.observe("requests_total", 1, status=str(status), **labels)
            self.metrics.observe("request_duration_seconds", duration, **labels)
        if outcome == "aborted":
            self.metrics.observe("client_disconnects_total", 1, endpoint=record.endpoint)
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


# Checks the Host header, against DNS rebinding: a web page can make its own domain resolve to an address of the
# reader's machine. Its requests then look like requests of the same origin; only the name in Host is foreign.

ANY = "*"
SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


class HostRule:
    """Accept loopback names, the bound address and the allowed hosts. bound: address or name that the server is bound
    to; for all addresses (0.0.0.0), any IP address in Host is accepted, since only names can be rebound. keyed: the
    server requires API keys, which a foreign page has not: all hosts are accepted unless `allowed` lists some."""

    def __init__(self, bound: str, allowed: Collection[str], *, keyed: bool) -> None:
        self._active = ANY not in allowed and (bool(allowed) or not keyed)
        self._names = {"localhost", *map(host_of, (bound, *allowed))}
        address = _address(bound)
        self._any_address = address is not None and address.is_unspecified

    def check(self, headers: Headers) -> None:
        """ApiError 421 for a host that is not accepted. A request without a Host header is accepted: browsers send
        one."""
        value = headers.get("host")
        if not self._active or value is None:
            return
        host = host_of(value)
        if host in self._names:
            return
        address = _address(host)
        if address is not None and (self._any_address or address.is_loopback):
            return
        message = "Host: this host name is not allowed; the operator can add it to the setting allowed_host."
        raise ApiError(421, message, code="host_not_allowed")


def host_of(value: str) -> str:
    """The name or address in a Host header, without its port, in lower case."""
    value = value.strip().lower()
    if value.startswith("["):
        return value[1:].partition("]")[0]
    name, _, _ = value.partition(":") if value.count(":") == 1 else (value, "", "")
    return name.removesuffix(".")


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(host)
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address


KEY_PROTOCOL = "openai-insecure-api-key."
"""Prefix of a subprotocol that is a key, since pages cannot set headers of a WebSocket. OpenAI's clients send it."""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class Guards:
    """Who may send requests, by Host, Origin and API key.

    origins: web pages that may send requests with side effects, besides the server's own. CORS keeps others only from
    reading responses, and does not cover WebSockets: any page could use a server on loopback without a key. open_paths:
    those that require no key, matched by scope["path"] alone.
    """

    def __init__(
        self, hosts: HostRule, origins: Collection[str], keys: Collection[str], open_paths: Collection[str]
    ) -> None:
        self._hosts = hosts
        self._origins = frozenset(origins)
        self._digests = [_digest(key.encode()) for key in keys]
        self._open_paths = frozenset(open_paths)

    def check(self, scope: Scope, headers: Headers, record: RequestRecord) -> None:
        """Raise ApiError 421, 403 or 401. A key becomes the client of the record."""
        self._hosts.check(headers)
        method = scope.get("method")
        origin = headers.get("origin")
        own = origin is None or origin.partition("://")[2] == headers.get("host")
        if method not in SAFE_METHODS and not own and not self._origins & {ANY, origin}:
            problem = "web pages of this origin are not allowed; the operator can add it to the setting cors_origin"
            raise ApiError(403, f"Origin: {problem}.", code="origin_not_allowed")
        if not self._digests or scope["path"] in self._open_paths or method == "OPTIONS":  # a preflight carries no key
            return
        key = _bearer(scope) or _offered(scope)
        if key is None or not self._admits(key):
            needed = "An API key is required: send the header Authorization: Bearer KEY."
            raise ApiError(401, "The API key is invalid." if key else needed, code="invalid_api_key")
        record.client = _digest(key).hex()

    def _admits(self, key: bytes) -> bool:
        """Compare with all digests, so that timing reveals neither the length nor the position of a key."""
        digest = _digest(key)
        return sum(hmac.compare_digest(known, digest) for known in self._digests) > 0


def _bearer(scope: Scope) -> bytes | None:
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(values) != 1:
        return None
    scheme, _, key = values[0].partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" and key.strip() else None


def _offered(scope: Scope) -> bytes | None:
    """The key among the subprotocols of a WebSocket."""
    keys = [name.removeprefix(KEY_PROTOCOL) for name in scope.get("subprotocols", ()) if name.startswith(KEY_PROTOCOL)]
    return keys[0].encode() if len(keys) == 1 and keys[0] else None
