"""Ray Serve ingress: a reverse proxy that chooses a replica per request and passes bytes through unchanged.

A request whose replica goes away before it has sent a byte of the answer is tried on another: once, since it may be the
request that ends what answers it; more often where it was not delivered, or not taken.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field

import httpx
import msgspec
from fastapi import FastAPI
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from service.api.app import DOCUMENTS, ENDPOINTS, PROBES, SHARES
from service.api.http.admission import Admission
from service.api.http.errors import CLIENT_CLOSED, ApiError, ClientLeft, ErrorBody, bad_request, install_error_handlers
from service.api.http.middleware import Guards, HostRule, RequestMiddleware, record_of
from service.api.http.streaming import unless_disconnected
from service.metrics.metrics import Metrics
from service.settings.settings import Settings

from .routing import LISTING_TIMEOUT, Replicas, media_key

CHAT, SPEECH = "/v1/chat/completions", "/v1/audio/speech"
TARGETS = "/metrics/targets"
READING = frozenset({"GET", "HEAD", "OPTIONS"})
MOST_TRIES, MOST_LOSSES = 3, 2
"""Replicas that a request is offered to one after the other, and of them those that may end while they have it."""
LEAVING = "shutting_down"
"""Refusal of a replica that ends once it is done with what it has, as when all are replaced."""
LEAVING_SECONDS = 3 * LISTING_TIMEOUT
"""For how long another replica is looked for when the only one that is known is leaving: on a busy host a listing takes
seconds."""
KEEP_ALIVE = 5.0
"""Seconds for which idle connections stay open: less than replicas keep them, so that none is taken that is closing."""
LONGEST_REFUSAL = 64 << 10
"""Bytes of a refusal that are read to see its reason."""
CONNECT_SECONDS = 5.0
RETRY_AFTER = 2.0
LARGE = 16 << 10
"""Bytes of a chat request from which on its picture is looked for in a thread."""
HOP_BY_HOP = {
    b"connection", b"keep-alive", b"proxy-authorization", b"te", b"trailer", b"transfer-encoding", b"upgrade",
}  # fmt: skip
"""Headers that are about one connection (RFC 9110, 7.6.1)."""
ADDED_BY_PROXY = {b"date", b"server", b"x-request-id"}
"""Headers of an answer that Ray Serve's proxy adds, whether or not they are there."""
TRY_AGAIN_LATER = 1013
GONE_AWAY = 1001


class _Refused(httpx.TransportError):
    """A replica said that it cannot take a request now."""


UNDELIVERED = (httpx.ConnectError, httpx.ConnectTimeout, _Refused)


@dataclass
class _Tries:
    """Replicas that a request was offered to, and how many of them were lost with it."""

    repeatable: bool
    replicas: list[str] = field(default_factory=list)
    losses: int = 0

    @property
    def last(self) -> bool:
        """Whether there is no other try if the newest replica is lost."""
        return not self.repeatable or len(self.replicas) == MOST_TRIES or self.losses + 1 == MOST_LOSSES

    def another_after(self, error: httpx.TransportError) -> bool:
        self.losses += not isinstance(error, UNDELIVERED)
        return self.repeatable and len(self.replicas) < MOST_TRIES and self.losses < MOST_LOSSES


@dataclass(frozen=True)
class _Begun:
    """An answer whose first piece has come."""

    answer: httpx.Response
    first: bytes
    rest: AsyncGenerator[bytes]

    async def pieces(self) -> AsyncIterator[bytes]:
        if self.first:
            yield self.first
        async for piece in self.rest:
            yield piece


class Front:
    """Ray Serve's ingress. max_in_flight: requests that pass at once."""

    def __init__(self, settings: Settings, max_in_flight: int, replicas: DeploymentHandle) -> None:
        self._settings = settings
        self._max_in_flight = max_in_flight
        self._handle = replicas
        self._replicas = Replicas(self._listed, settings.max_in_flight)
        # Replicas enforce timeouts.
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        kept = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=KEEP_ALIVE)
        fresh = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        self._client = httpx.AsyncClient(timeout=timeout, limits=kept, trust_env=False)
        self._fresh = httpx.AsyncClient(timeout=timeout, limits=fresh, trust_env=False)
        """Client for requests that must not be sent twice: a replica might close a kept connection just then."""
        self._fresh.headers.clear()
        self._client.headers.clear()

    def __serve_build_asgi_app__(self) -> ASGIApp:
        settings = self._settings
        open_paths = [*PROBES, *(["/metrics", TARGETS] if settings.metrics_open else [])]
        open_paths += DOCUMENTS if settings.page else []
        keys = settings.keys()
        hosts = HostRule(settings.host, settings.allowed_host, keyed=bool(keys))
        metrics = Metrics()
        app = FastAPI(openapi_url=None)
        app.mount("/", self._answer)
        install_error_handlers(app)
        app.add_middleware(
            RequestMiddleware,
            endpoints=ENDPOINTS,
            admission=Admission(self._max_in_flight, settings.max_pending_bytes, metrics, SHARES),
            metrics=metrics,
            max_body=settings.max_body,
            guards=Guards(hosts, settings.cors_origin, keys, open_paths),
        )
        return _without_proxy_headers(app)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            await self._pass_socket(WebSocket(scope, receive, send))
        elif scope["method"] == "OPTIONS":  # which needs no key: the replica says what pages may do
            await self._pass_on(Request(scope, receive), send)
        elif scope["path"] == TARGETS:
            # For Prometheus' http_sd_configs: every replica is a target of its own.
            targets = [{"targets": [address]} for address in await self._listed()]
            await JSONResponse(targets)(scope, receive, send)
        elif scope["path"] == "/metrics":
            raise ApiError(404, f"Each replica has its own metrics: {TARGETS} lists them.", code="not_found")
        else:
            await self._pass_on(Request(scope, receive), send)

    async def _listed(self) -> list[str]:
        """Addresses of the replicas that answer; one that is gone does with an exception."""
        try:
            answers = await self._handle.broadcast("address").results_async(return_exceptions=True)
        except DeploymentUnavailableError:  # there is none
            return []
        return sorted(answer for answer in answers if isinstance(answer, str))

    async def _choose(self, held: AsyncExitStack, key: str | None, failed: Sequence[str] = ()) -> str:
        """Address of a replica that has a request more until `held` is left."""
        try:
            async with asyncio.timeout(self._settings.queue_timeout):
                return await held.enter_async_context(self._replicas.one(key, failed))
        except TimeoutError as error:
            message = "All replicas are busy; retry in a moment."
            raise ApiError(503, message, code="overloaded", retry_after=RETRY_AFTER) from error

    async def _pass_on(self, request: Request, send: Send) -> None:
        key, content = None, None
        if may_be_repeated(request.method, request.url.path):
            content = await request.body() if has_body(request.headers) else b""
            if request.url.path == CHAT:
                key = media_key(content) if len(content) < LARGE else await asyncio.to_thread(media_key, content)
        tries = _Tries(repeatable=content is not None)
        while True:
            async with AsyncExitStack() as held:
                address = await self._choose(held, key, tries.replicas)
                tries.replicas.append(address)
                beginning = self._begin(request, content, address, held, tries)
                try:
                    begun = await (beginning if content is None else unless_disconnected(request, beginning))
                except ClientLeft:
                    record_of(request.scope).outcome = "aborted"
                    await Response(status_code=CLIENT_CLOSED)(request.scope, request.receive, send)
                    return
                except httpx.TransportError as error:
                    if tries.another_after(error):
                        continue
                    message = "The replica went away; retry in a moment."
                    raise ApiError(503, message, code="engine_unavailable", retry_after=RETRY_AFTER) from error
                response = StreamingResponse(begun.pieces(), begun.answer.status_code)
                response.raw_headers = _without(HOP_BY_HOP, begun.answer.headers.raw)
                await response(request.scope, request.receive, send)
                return

    async def _begin(
        self, request: Request, content: bytes | None, address: str, held: AsyncExitStack, tries: _Tries
    ) -> _Begun:
        """Sends the request and waits for the first bytes of the answer's body, or its end. `held` closes the answer.

        TransportError when the replica is gone; or, if there is another try and another replica, when its engine is
        gone, or it is full or leaving.
        """
        client = self._fresh if content is None else self._client
        headers = _without(HOP_BY_HOP, request.headers.raw)
        if "transfer-encoding" in request.headers:
            headers = _without({b"content-length"}, headers)  # it says nothing then (RFC 9112, 6.3)
        try:
            onward = client.build_request(
                request.method,
                f"http://{address}{_target(request.scope)}",
                headers=headers,
                content=request.stream() if content is None else content,
            )
        except httpx.InvalidURL as error:
            raise bad_request("The request's target is not a valid URL.") from error
        answer = await client.send(onward, stream=True)
        held.push_async_callback(answer.aclose)
        rest = await held.enter_async_context(aclosing(answer.aiter_raw()))
        first = await anext(rest, b"")
        if answer.status_code == 503 and not tries.last:
            while len(first) < LONGEST_REFUSAL and (piece := await anext(rest, b"")):
                first += piece
            code = _code(first)
            if code == LEAVING:
                await self._replicas.find_others(tries.replicas, LEAVING_SECONDS)
            if self._replicas.others(tries.replicas):
                if code in ("overloaded", LEAVING):
                    raise _Refused(code)
                if code == "engine_unavailable":
                    raise httpx.RemoteProtocolError("the replica's engine is gone")
        return _Begun(answer, first, rest)

    async def _pass_socket(self, client: WebSocket) -> None:
        # Its origin has been judged here: the replica has another host than the one that the page knows.
        headers = {name: client.headers[name] for name in ("authorization",) if name in client.headers}
        try:
            async with AsyncExitStack() as held:
                opened = connect(
                    f"ws://{await self._choose(held, None)}{_target(client.scope)}",
                    additional_headers=headers,
                    subprotocols=client.scope.get("subprotocols") or None,
                    max_size=None,
                    proxy=None,
                    open_timeout=CONNECT_SECONDS,
                )
                replica = await held.enter_async_context(opened)
                await client.accept(replica.subprotocol)
                async with asyncio.TaskGroup() as both:
                    upward = both.create_task(_upward(client, replica))
                    await _downward(replica, client)
                    upward.cancel()
        except (ApiError, InvalidHandshake, OSError, TimeoutError):
            await client.close(TRY_AGAIN_LATER)


async def _upward(client: WebSocket, replica: ClientConnection) -> None:
    while True:
        message = await client.receive()
        if message["type"] == "websocket.disconnect":
            await replica.close(message.get("code") or GONE_AWAY)
            return
        text = message.get("text")
        try:
            await replica.send(message["bytes"] if text is None else text)
        except ConnectionClosed:
            return


async def _downward(replica: ClientConnection, client: WebSocket) -> None:
    """Passes messages to the client until the replica closes, and then closes the client with the same code."""
    try:
        async for message in replica:
            await (client.send_text(message) if isinstance(message, str) else client.send_bytes(message))
        await client.close(replica.close_code or GONE_AWAY, replica.close_reason)
    except ConnectionClosed:
        await client.close(replica.close_code or GONE_AWAY, replica.close_reason)
    except (WebSocketDisconnect, RuntimeError):  # the client was closed first
        return


def _without_proxy_headers(app: ASGIApp) -> ASGIApp:
    """Strips headers that the proxy adds, so they appear once."""

    async def stripped(scope: Scope, receive: Receive, send: Send) -> None:
        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = _without(ADDED_BY_PROXY, message["headers"])
            await send(message)

        await app(scope, receive, answer)

    return stripped


def may_be_repeated(method: str, path: str) -> bool:
    """Whether a request changes nothing at a replica, so that another one may be asked the same."""
    return method in READING or (method == "POST" and path in (CHAT, SPEECH))


def has_body(headers: Mapping[str, str]) -> bool:
    """Whether a request comes with one; to read one through Ray's proxy costs a call of that process."""
    return "transfer-encoding" in headers or headers.get("content-length", "0") != "0"


def _code(body: bytes) -> str | None:
    """error.code of an answer that refuses a request."""
    try:
        return msgspec.json.decode(body, type=ErrorBody).error.code
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _without(names: set[bytes], headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name.lower() not in names]


def _target(scope: Scope) -> str:
    """Path and query as they were written."""
    query = scope["query_string"].decode("latin-1")
    path = scope.get("raw_path") or scope["path"].encode()
    return path.decode("latin-1") + (f"?{query}" if query else "")
