"""API keys. Every path requires one unless it is listed as open, so new paths are closed by default."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection
from ipaddress import IPv4Address, IPv6Address, ip_address

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from service.api.http.errors import ApiError, refuse_socket
from service.api.http.record import RequestRecord

# Checks the Host header, against DNS rebinding: a web page can make its own domain resolve to an address of the
# reader's machine. Its requests then look like requests of the same origin; only the name in Host is foreign.

ANY = "*"


class HostRule:
    """Accepts loopback names, the bound address and the allowed hosts.

    bound: address or name that the server is bound to. When it is bound to all addresses (0.0.0.0), any IP address in
    Host is accepted: only names can be rebound. keyed: the server requires API keys. A foreign page has none, so all
    hosts are accepted unless `allowed` lists some.
    """

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


# Refuses web pages of other origins. CORS only keeps such a page from reading a response, not from making the request,
# and does not cover WebSockets: without this, any web page could use a server on loopback that has no API key.

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
