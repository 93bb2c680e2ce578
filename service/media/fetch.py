"""Fetches remote media without giving clients access to the server's own network (SSRF), and reads data: URLs.

Addresses are resolved and checked inside the connector, which then connects to the checked address: there is no second
look-up that DNS rebinding could exploit, and no second URL parser that could disagree with the first.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import KW_ONLY, dataclass, field
from functools import cache, partial
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from typing import Any, Literal

import httpcore
import httpx

from models.interfaces.errors import InputError
from service.confined.workers import FairSemaphore
from service.system.concurrency import shielded

# ipaddress.is_global alone is not enough: Python 3.11 calls 192.0.0.192 (a cloud's metadata service), NAT64 and 6to4
# prefixes of private addresses, site-local addresses and multicast global.
DENIED: tuple[IPv4Network | IPv6Network, ...] = tuple(
    map(
        ip_network,
        (
            *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12"),
            *("192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15"),
            *("198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/4", "240.0.0.0/4"),
            # ::/96 has the unspecified and the loopback address and all IPv4-compatible addresses.
            *("::/96", "::ffff:0:0/96", "64:ff9b::/96", "64:ff9b:1::/48", "100::/64", "2001::/23"),
            *("2001:db8::/32", "2002::/16", "fc00::/7", "fe80::/10", "fec0::/10", "ff00::/8"),
        ),
    )
)


def is_public(address: str) -> bool:
    """Whether an IPv4 or IPv6 address belongs to the public internet."""
    try:
        parsed: IPv4Address | IPv6Address = ip_address(address)
    except ValueError:
        return False
    if isinstance(parsed, IPv6Address) and parsed.scope_id is not None:
        return False
    return parsed.is_global and not any(parsed in network for network in DENIED if network.version == parsed.version)


MAX_REDIRECTS = 3
MAX_URL_LENGTH = 8192
MAX_ADDRESSES = 4
RESOLVED_AT_ONCE, RESOLVED_FOR_ONE = 32, 8
"""Names that are looked up at a time, of all clients and of one, each in a thread. A look-up cannot be ended: a
slow name server holds the thread for half a minute. One client's slow names leave three quarters of the threads to
others."""
FETCHED_AT_ONCE, FETCHED_FOR_ONE = 64, 16
"""URLs that are fetched at a time, of all clients and of one. Each takes a descriptor, and the connections of clients
leave no more than a fifth of these. Hosts that never answer keep their turns until the time for a URL is up: those that
one client names leave three quarters to others."""
TURN_SECONDS = 30.0
"""A URL waits no longer than this for its turn: three times what a host may take unless the operator says otherwise."""
CONNECT_SECONDS = 5.0
DEFAULT_PORTS = {"https": 443, "http": 80}

Resolver = Callable[[str, int], Awaitable[list[str]]]
"""(host, port) -> addresses. Raises OSError when the name does not resolve."""


@dataclass(frozen=True)
class UrlPolicy:
    """mode: "off" (data: URLs only), "allowlist" (listed hosts) or "public" (any host on the default port).

    hosts: the allowlist, `host` or `host:port`. allow_http: plain http, too. In every mode, hosts that resolve to any
    address outside the public internet are refused.
    """

    mode: Literal["off", "allowlist", "public"] = "off"
    hosts: frozenset[str] = frozenset()
    allow_http: bool = False


class BlockedAddress(Exception):
    """A host resolves to an address that is not public."""


class FetchesBusy(Exception):
    """The turn of a URL did not come: others are being fetched. A retry may find it."""


class GuardedBackend(httpcore.AsyncNetworkBackend):
    """Connects to a checked address of the host; TLS still verifies the host's name."""

    def __init__(self, resolver: Resolver, connector: httpcore.AsyncNetworkBackend) -> None:
        self._resolver = resolver
        self._connector = connector

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - the base class names it
        local_address: str | None = None,
        socket_options: Iterable[Any] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        try:
            addresses = await self._resolver(host, port)
        except (OSError, UnicodeError) as error:
            raise httpcore.ConnectError("the host name cannot be resolved") from error
        if not addresses:
            raise httpcore.ConnectError("the host name cannot be resolved")
        if not all(map(is_public, addresses)):
            raise BlockedAddress
        failure: Exception | None = None
        for address in addresses[:MAX_ADDRESSES]:
            try:
                return await self._connector.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise httpcore.ConnectError("no address of the host accepts a connection") from failure

    async def sleep(self, seconds: float) -> None:
        await self._connector.sleep(seconds)


@cache
def _public_certificates() -> ssl.SSLContext:
    return httpcore.default_ssl_context()


@dataclass(eq=False)
class Fetcher:
    """Fetches media under a policy. Uses no proxy, no cookies, no environment. Belongs to one event loop. resolver: the
    system's unless given. ssl_context: httpcore's own unless given."""

    policy: UrlPolicy
    _: KW_ONLY
    resolver: Resolver | None = None
    connector: httpcore.AsyncNetworkBackend = field(default_factory=httpcore.AnyIOBackend)
    ssl_context: ssl.SSLContext | None = None

    def __post_init__(self) -> None:
        # Not the loop's own threads, for which grammars and everything else would have to wait.
        self._threads = ThreadPoolExecutor(RESOLVED_AT_ONCE, thread_name_prefix="resolve")
        self._semaphore = FairSemaphore(FETCHED_AT_ONCE, FETCHED_FOR_ONE)
        self._look_ups = FairSemaphore(RESOLVED_AT_ONCE, RESOLVED_FOR_ONE)

    async def fetch(
        self,
        url: str,
        *,
        field: str,
        max_bytes: int,
        seconds: float,
        client: str = "",
        admit: Callable[[int], None] = lambda size: None,
    ) -> bytes:
        """The content of a URL, after at most three redirects, each checked like the first URL.

        max_bytes is checked while reading, and admit is called with the size of each chunk (what it raises ends the
        fetch). seconds: for everything together, once its turn has come. client: whose turn it takes. Raises InputError
        with `field` for URLs that the policy refuses and for every failure; messages reveal nothing about the host that
        was reached. FetchesBusy if its turn does not come.
        """
        target = self._checked(url, field)
        async with AsyncExitStack() as held:
            try:
                async with asyncio.timeout(TURN_SECONDS):
                    await held.enter_async_context(self._semaphore.acquire(client))
            except TimeoutError as error:
                message = f"{field}: not fetched: other URLs were, for {TURN_SECONDS:g} seconds; retry shortly."
                raise FetchesBusy(message) from error
            try:
                async with asyncio.timeout(seconds):
                    # httpcore would read them for each connection, while every stream waits.
                    self.ssl_context = self.ssl_context or await asyncio.to_thread(_public_certificates)
                    backend = GuardedBackend(self.resolver or partial(self._resolve, client), self.connector)
                    async with httpcore.AsyncConnectionPool(
                        ssl_context=self.ssl_context, max_keepalive_connections=0, network_backend=backend
                    ) as connections:
                        for _ in range(MAX_REDIRECTS + 1):
                            answer = await self._get(connections, target, field, max_bytes, admit)
                            if isinstance(answer, bytes):
                                return answer
                            target = self._checked(answer, field)
            except BlockedAddress as error:
                raise InputError(field, "the URL's host is not on the public internet") from error
            except (TimeoutError, httpcore.TimeoutException) as error:
                raise InputError(field, f"the URL could not be fetched within {seconds:g} seconds") from error
            except (httpcore.NetworkError, httpcore.ProtocolError, ssl.SSLError, OSError) as error:
                raise InputError(field, "the URL could not be fetched") from error
            raise InputError(field, f"the URL has too many redirects: at most {MAX_REDIRECTS} allowed")

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _resolve(self, client: str, host: str, port: int) -> list[str]:
        async with AsyncExitStack() as waiting:
            await waiting.enter_async_context(self._look_ups.acquire(client))
            look_up = asyncio.create_task(self._look_up(host, port, turn=waiting.pop_all()))
        return await shielded(look_up)

    async def _look_up(self, host: str, port: int, *, turn: AsyncExitStack) -> list[str]:
        """The turn ends with the thread's work, not when its request has left."""
        async with turn:
            look_up = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
            found = await asyncio.get_running_loop().run_in_executor(self._threads, look_up)
            return [str(address[0]) for *_, address in found]

    def _checked(self, url: str, field: str) -> httpx.URL:
        if self.policy.mode == "off":
            if not url.lower().startswith(("http://", "https://")):
                raise InputError(field, "not a data: URL, and this server takes no others (setting media_urls)")
            raise InputError(
                field, "remote URLs are disabled on this server (setting media_urls); send the media as a data: URL"
            )
        if len(url) > MAX_URL_LENGTH:
            raise InputError(
                field, f"the URL is too long: {len(url)} characters given, at most {MAX_URL_LENGTH} allowed"
            )
        try:
            parsed = httpx.URL(url)
            is_named = bool(parsed.host)  # decodes an internationalised name, which may be invalid
        except (httpx.InvalidURL, UnicodeError) as error:
            raise InputError(field, "not a valid URL") from error
        schemes = ("https", "http") if self.policy.allow_http else ("https",)
        if parsed.scheme not in schemes:
            raise InputError(field, f"the URL must begin with data: or {' or '.join(f'{s}://' for s in schemes)}")
        if not is_named or parsed.userinfo:
            raise InputError(field, "the URL must have a host and no user")
        host = parsed.raw_host.decode("ascii")
        if self.policy.mode == "allowlist":
            named = {f"{host}:{_port(parsed)}"} | ({host} if parsed.port is None else set())
            if not named & {entry.lower() for entry in self.policy.hosts}:
                raise InputError(field, "the URL's host is not on this server's list of media hosts")
        elif parsed.port is not None:
            raise InputError(field, "the URL must not have a port")
        return parsed

    async def _get(
        self,
        connections: httpcore.AsyncConnectionPool,
        url: httpx.URL,
        field: str,
        max_bytes: int,
        admit: Callable[[int], None],
    ) -> bytes | str:
        """The body, or the target of a redirect."""
        target = httpcore.URL(scheme=url.raw_scheme, host=url.raw_host, port=_port(url), target=url.raw_path)
        headers = [
            (b"Host", url.netloc),
            (b"User-Agent", b"reprise"),
            (b"Accept", b"image/*, video/*, audio/*"),
            # The size of a compressed body is known only after unpacking.
            (b"Accept-Encoding", b"identity"),
        ]
        timeouts = {"connect": CONNECT_SECONDS}
        async with connections.stream("GET", target, headers=headers, extensions={"timeout": timeouts}) as response:
            received = {name.lower(): value for name, value in response.headers}
            if response.status in (301, 302, 303, 307, 308) and b"location" in received:
                try:
                    return str(url.join(received[b"location"].decode("ascii")))
                except (httpx.InvalidURL, UnicodeError) as error:
                    raise InputError(field, "the URL redirects to something that is not a URL") from error
            if response.status != 200:
                raise InputError(field, f"the URL's server answered with status {response.status}")
            if received.get(b"content-encoding", b"identity").lower() != b"identity":
                raise InputError(field, "the URL's server sent a compressed body")
            declared = received.get(b"content-length", b"0")
            body = bytearray()
            if declared.isdigit() and int(declared[:20]) > max_bytes:
                raise _too_large(field, max_bytes)
            async for chunk in response.aiter_stream():
                body += chunk
                admit(len(chunk))
                if len(body) > max_bytes:
                    raise _too_large(field, max_bytes)
            return bytes(body)


def _port(url: httpx.URL) -> int:
    return url.port if url.port is not None else DEFAULT_PORTS[url.scheme]


def _too_large(field: str, max_bytes: int) -> InputError:
    return InputError(field, f"the URL's content is too large: at most {max_bytes} bytes allowed")


# data: URLs (RFC 2397), base64 only

SPACES = " \t\n\r\f\v"
WITHOUT_SPACES = str.maketrans("", "", SPACES)
URL_SAFE = str.maketrans("-_", "+/")
ESCAPED = {"%2B": "+", "%2b": "+", "%2F": "/", "%2f": "/", "%3D": "=", "%3d": "="}
"""What clients that percent-encode a URL make of base64; anything else with a percent sign is none."""


def is_data_url(url: str) -> bool:
    return _begun(url)[:5].lower() == "data:"


def declared_type(url: str) -> str:
    """The media type that a data: URL declares, in lower case; "" for any other URL. A hint: formats are detected from
    the bytes."""
    return _begun(url)[5:256].partition(",")[0].partition(";")[0].strip().lower() if is_data_url(url) else ""


def _begun(url: str) -> str:
    """The URL without whitespace before it, which browsers ignore (https://url.spec.whatwg.org, basic URL parser)."""
    return url.lstrip(SPACES) if url[:1].isspace() else url


def payload_of(url: str, *, field: str) -> str:
    """The base64 in `data:<media type>[;param=value]*;base64,<payload>`. Raises InputError for any other form."""
    url = _begun(url)
    # Only a short prefix is searched for the comma: the URL may have megabytes.
    comma = url.find(",", 0, 256)
    header = url[5:comma] if is_data_url(url) and comma > 0 else ""
    _, *parameters = header.split(";")
    if not parameters or parameters[-1].strip().lower() != "base64":
        raise InputError(field, "a data URL must have the form data:<media type>;base64,<data>")
    return url[comma + 1 :]


def without_spaces(payload: str) -> str:
    """Base64 as one line: tools like `base64 FILE` wrap what they write."""
    return payload.translate(WITHOUT_SPACES) if any(space in payload for space in SPACES) else payload


def decode_base64(payload: str, *, field: str, max_bytes: int) -> bytes:
    """Decodes base64 of at most `max_bytes` bytes, also in the URL-safe alphabet or with percent signs. Only ASCII
    whitespace is ignored; the length is checked before decoding. InputError."""
    payload = without_spaces(payload)
    if len(payload) > (max_bytes + 2) // 3 * 4:
        raise InputError(field, f"the data is too large: at most {max_bytes} bytes allowed")
    try:
        try:
            data = base64.b64decode(payload, validate=True)
        except ValueError:  # so that the usual form costs no search
            data = base64.b64decode(_standard(payload), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InputError(field, "the data is not valid base64") from error
    if len(data) > max_bytes:
        raise InputError(field, f"the data is too large: at most {max_bytes} bytes allowed")
    return data


def _standard(payload: str) -> str:
    """Base64 in the standard alphabet. In the URL-safe one the padding may be left out, as in tokens (RFC 7515)."""
    for escaped, character in ESCAPED.items():
        payload = payload.replace(escaped, character)
    if "-" in payload or "_" in payload:
        payload = payload.translate(URL_SAFE)
        payload += "=" * (-len(payload) % 4)
    return payload
