"""Refuses web pages of other origins. CORS only keeps such a page from reading a response, not from making the request,
and does not cover WebSockets: without this, any web page could use a server on loopback that has no API key."""

from __future__ import annotations

from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from service.api.http.errors import ApiError, refuse_socket

SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


class OriginMiddleware:
    """Refuses requests with side effects from pages whose origin is neither the server's own nor allowed. Clients other
    than browsers send no Origin header."""

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        self._app = app
        self._allowed = frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope.get("method") in SAFE_METHODS or self._admits(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        message = (
            "Origin: web pages of this origin are not allowed; the operator can add it to the setting cors_origin."
        )
        error = ApiError(403, message, code="origin_not_allowed")
        if scope["type"] == "websocket":
            await refuse_socket(error, scope, receive, send)
        else:
            await error.response()(scope, receive, send)

    def _admits(self, headers: Headers) -> bool:
        origin = headers.get("origin")
        if origin is None or "*" in self._allowed or origin in self._allowed:
            return True
        return origin.partition("://")[2] == headers.get("host")
