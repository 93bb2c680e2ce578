"""Web pages of other origins. CORS keeps such a page from reading an answer, but not from having one made, and does not
cover WebSockets at all: a server on loopback without a key would work for any page that a browser there shows."""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from service.api.errors import ApiError

READING = ("GET", "HEAD", "OPTIONS")


class OriginMiddleware:
    """Refuses requests that make something happen and come from a page of an origin that is neither the server's own
    nor allowed. Clients that are no browsers send no Origin."""

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        self._app = app
        self._allowed = frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope.get("method") in READING or self._admits(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": "origin not allowed"})
            return
        error = ApiError(403, "Pages of this origin may not call this server.", code="origin_not_allowed")
        await error.response()(scope, receive, send)

    def _admits(self, headers: Headers) -> bool:
        origin = headers.get("origin")
        if origin is None or "*" in self._allowed or origin in self._allowed:
            return True
        return origin.partition("://")[2] == headers.get("host")
