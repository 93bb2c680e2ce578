"""API keys. Every path requires one unless it is listed as open, so new paths are closed by default."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from service.api.http.errors import ApiError, refuse_socket
from service.api.http.record import RequestRecord

KEY_PROTOCOL = "openai-insecure-api-key."
"""Prefix of a subprotocol that is a key, since pages cannot set headers of a WebSocket. OpenAI's clients send it."""


class KeyRing:
    """Compares digests, always all of them, so that timing reveals neither the length nor the position of a key."""

    def __init__(self, keys: Collection[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def admits(self, key: bytes) -> bool:
        digest = _digest(key)
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(known, digest)
        return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class AuthMiddleware:
    """Bearer keys for HTTP and WebSockets, which may also offer one as a subprotocol. Open paths are matched by
    scope["path"] alone, never by a header."""

    def __init__(self, app: ASGIApp, keys: KeyRing, open_paths: Collection[str]) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or not self._keys or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        key = _bearer(scope) or _offered(scope)
        if key is not None and self._keys.admits(key):
            if isinstance(record := scope.get("reprise.record"), RequestRecord):
                record.client = _digest(key).hex()
            await self._app(scope, receive, send)
            return
        problem = (
            "The API key is invalid." if key else "An API key is required: send the header Authorization: Bearer KEY."
        )
        error = ApiError(401, problem, code="invalid_api_key")
        if scope["type"] == "websocket":
            await refuse_socket(error, scope, receive, send)
        else:
            await error.response()(scope, receive, send)


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
