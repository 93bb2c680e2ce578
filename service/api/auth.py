"""API keys. Every path needs one unless it is named open: what is added later is closed until someone opens it."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection

from starlette.types import ASGIApp, Receive, Scope, Send

from service.api.errors import ApiError


class KeyRing:
    """Compares digests, all of them each time, so that neither a key's length nor its place shows in the time taken."""

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
    """Bearer keys for HTTP and WebSockets, decided on scope["path"]: no header takes part in it."""

    def __init__(self, app: ASGIApp, keys: KeyRing, open_paths: Collection[str]) -> None:
        self._app = app
        self._keys = keys
        self._open_paths = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or not self._keys or scope["path"] in self._open_paths:
            await self._app(scope, receive, send)
            return
        key = _bearer(scope)
        if key is not None and self._keys.admits(key):
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await receive()
            await send({"type": "websocket.close", "code": 1008, "reason": "API key missing or wrong"})
            return
        problem = "The API key is wrong." if key else "An API key is needed: send the header Authorization: Bearer KEY."
        await ApiError(401, problem, code="invalid_api_key").response()(scope, receive, send)


def _bearer(scope: Scope) -> bytes | None:
    values = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(values) != 1:
        return None
    scheme, _, key = values[0].partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" and key.strip() else None
