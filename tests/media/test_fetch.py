"""What is fetched: from which addresses, within which limits; and data: URLs with their base64."""

from __future__ import annotations

import asyncio
import base64
import gc
import re
import socket
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpcore
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.interfaces.errors import InputError
from service.media import fetch as module
from service.media.fetch import (
    FETCHED_AT_ONCE,
    FETCHED_FOR_ONE,
    RESOLVED_AT_ONCE,
    RESOLVED_FOR_ONE,
    Fetcher,
    FetchesBusy,
    UrlPolicy,
    declared_type,
    decode_base64,
    is_public,
    payload_of,
)
from tests.support.waiting import GENEROUS, until

PUBLIC = "93.184.216.34"
OPEN = UrlPolicy("public", allow_http=True)

Answer = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


class Loopback(httpcore.AsyncNetworkBackend):
    """Leads every connection to one local port and remembers where it was meant to go."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._backend = httpcore.AnyIOBackend()
        self.asked: list[tuple[str, int]] = []

    async def connect_tcp(self, host, port, timeout=None, local_address=None, socket_options=None):  # noqa: ASYNC109
        self.asked.append((host, port))
        return await self._backend.connect_tcp("127.0.0.1", self._port, timeout)


class Unreachable(httpcore.AsyncNetworkBackend):
    def __init__(self) -> None:
        self.asked: list[str] = []

    async def connect_tcp(self, host, port, timeout=None, local_address=None, socket_options=None):  # noqa: ASYNC109
        self.asked.append(host)
        raise httpcore.ConnectError


def names(**table: list[str]) -> Callable[[str, int], Awaitable[list[str]]]:
    """A resolver for `name.example`."""

    async def resolver(host: str, port: int) -> list[str]:
        if host.split(".")[0] not in table:
            raise OSError("no such host")
        return table[host.split(".")[0]]

    return resolver


@asynccontextmanager
async def server(answer: Answer, tls: ssl.SSLContext | None = None) -> AsyncIterator[Loopback]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await reader.readuntil(b"\r\n\r\n")
            await answer(request, writer)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    listener = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    try:
        yield Loopback(listener.sockets[0].getsockname()[1])
    finally:
        listener.close()


def says(head: str, body: bytes = b"") -> Answer:
    async def answer(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(f"HTTP/1.1 {head}\r\n\r\n".encode() + body)

    return answer


async def fetch(fetcher: Fetcher, url: str, *, max_bytes: int = 1000, seconds: float = 60.0) -> bytes:
    try:
        return await fetcher.fetch(url, field="f", max_bytes=max_bytes, seconds=seconds)
    except InputError as error:
        assert error.field == "f"
        assert "127.0" not in str(error) and "example" not in str(error)
        raise
    finally:
        await fetcher.close()


async def test_fetches_from_the_checked_address() -> None:
    """The name is looked up once: a second look-up could be answered differently (DNS rebinding)."""
    requests, asked = list[bytes](), list[str]()

    async def resolver(host: str, port: int) -> list[str]:
        asked.append(host)
        return [PUBLIC] if len(asked) == 1 else ["127.0.0.1"]

    async def answer(request: bytes, writer: asyncio.StreamWriter) -> None:
        requests.append(request)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello")

    async with server(answer) as loopback:
        fetcher = Fetcher(OPEN, resolver=resolver, connector=loopback)
        assert await fetch(fetcher, "http://a.example/x%20y?q=1#fragment") == b"hello"
    assert asked == ["a.example"] and loopback.asked == [(PUBLIC, 80)]
    head = requests[0].lower()
    assert head.startswith(b"get /x%20y?q=1 http/1.1\r\n")
    assert b"host: a.example\r\n" in head and b"accept-encoding: identity" in head and b"cookie" not in head


async def test_tls_verifies_the_name_and_not_the_address() -> None:
    certificate = Path(__file__).parent / "tls" / "a.example.pem"
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate)
    trusting = ssl.create_default_context(cafile=str(certificate))
    resolver = names(a=[PUBLIC], b=[PUBLIC])
    async with server(says("200 OK\r\nContent-Length: 2", b"ok"), tls) as loopback:
        fetcher = Fetcher(UrlPolicy("public"), resolver=resolver, connector=loopback, ssl_context=trusting)
        assert await fetch(fetcher, "https://a.example/") == b"ok"
        for url, context in (("https://b.example/", trusting), ("https://a.example/", None)):
            fetcher = Fetcher(UrlPolicy("public"), resolver=resolver, connector=loopback, ssl_context=context)
            with pytest.raises(InputError, match="could not be fetched"):
                await fetch(fetcher, url)
    assert loopback.asked == [(PUBLIC, 443)] * 3


@pytest.mark.parametrize(
    "addresses",
    [["127.0.0.1"], ["::1"], ["169.254.169.254"], [PUBLIC, "10.0.0.1"], ["::ffff:93.184.216.34"], ["fe80::1%eth0"]],
)
@pytest.mark.parametrize("policy", [OPEN, UrlPolicy("allowlist", frozenset({"a.example"}), allow_http=True)])
async def test_one_private_address_blocks_the_host(addresses: list[str], policy: UrlPolicy) -> None:
    connector = Unreachable()
    with pytest.raises(InputError, match="public internet"):
        await fetch(Fetcher(policy, resolver=names(a=addresses), connector=connector), "http://a.example/")
    assert connector.asked == []


@pytest.mark.parametrize(
    "url",
    [
        *("http://127.0.0.1/", "http://[::1]/", "http://2130706433/", "http://0x7f.1/", "http://localhost/"),
        *("http://127.0.0.1\\@a.example/", "http://a.example\\@127.0.0.1/", "http://127.0.0.1#@a.example/"),
    ],
)
async def test_hosts_in_disguise(url: str) -> None:
    """The resolver answers as a system's would: numbers and localhost are the machine itself."""

    async def resolver(host: str, port: int) -> list[str]:
        return [PUBLIC] if host == "a.example" else ["127.0.0.1"]

    connector = Unreachable()
    with pytest.raises(InputError):
        await fetch(Fetcher(OPEN, resolver=resolver, connector=connector), url)
    assert set(connector.asked) <= {PUBLIC}


async def test_the_next_address_is_tried() -> None:
    connector = Unreachable()
    resolver = names(a=["8.8.8.8", "8.8.4.4"] + ["1.1.1.1"] * 9)
    with pytest.raises(InputError, match="could not be fetched"):
        await fetch(Fetcher(OPEN, resolver=resolver, connector=connector), "http://a.example/")
    assert connector.asked == ["8.8.8.8", "8.8.4.4", "1.1.1.1", "1.1.1.1"]


@pytest.mark.parametrize(
    ("policy", "url", "message"),
    [
        (UrlPolicy(), "https://a.example/", "remote URLs are disabled"),
        (UrlPolicy(), "HTTP://a.example/", "remote URLs are disabled"),
        (UrlPolicy(), "", "not a data: URL"),
        (UrlPolicy(), "file:///etc/passwd", "not a data: URL"),
        (UrlPolicy(), " data:image/png;base64,AAAA", "not a data: URL"),
        (UrlPolicy("public"), "http://a.example/", "https://"),
        (OPEN, "file:///etc/passwd", "must begin with"),
        (OPEN, "ftp://a.example/", "must begin with"),
        (OPEN, "a.example/x", "must begin with"),
        (OPEN, "http://user:secret@a.example/", "no user"),
        (OPEN, "http:///x", "host"),
        (OPEN, "http://a.example:8080/", "port"),
        (OPEN, "http://a.example/" + "x" * 9000, "too long"),
        (OPEN, "http://[::1/", "valid URL"),
        (UrlPolicy("allowlist", frozenset({"b.example"})), "https://a.example/", "list of media hosts"),
        (UrlPolicy("allowlist", frozenset({"a.example"})), "https://a.example:8443/", "list of media hosts"),
        (UrlPolicy("allowlist", frozenset({"a.example"})), "https://a.example.evil.example/", "list of media hosts"),
    ],
)
async def test_policy(policy: UrlPolicy, url: str, message: str) -> None:
    connector = Unreachable()
    with pytest.raises(InputError, match=message):
        await fetch(Fetcher(policy, resolver=names(a=[PUBLIC]), connector=connector), url)
    assert connector.asked == []


@pytest.mark.parametrize(("entry", "port"), [("a.example:8443", 8443), ("A.example", 80)])
async def test_allowlist(entry: str, port: int) -> None:
    policy = UrlPolicy("allowlist", frozenset({entry}), allow_http=True)
    url = "http://A.EXAMPLE/" if port == 80 else f"http://a.example:{port}/"
    async with server(says("200 OK\r\nContent-Length: 2", b"ok")) as loopback:
        assert await fetch(Fetcher(policy, resolver=names(a=[PUBLIC]), connector=loopback), url) == b"ok"
    assert loopback.asked == [(PUBLIC, port)]


def redirector(target: str, hops: int) -> Answer:
    seen = 0

    async def answer(_: bytes, writer: asyncio.StreamWriter) -> None:
        nonlocal seen
        seen += 1
        if seen <= hops:
            writer.write(f"HTTP/1.1 302 Found\r\nLocation: {target}\r\nContent-Length: 0\r\n\r\n".encode())
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    return answer


async def test_three_redirects_and_no_more() -> None:
    for hops, allowed in ((3, True), (4, False)):
        async with server(redirector("/next", hops)) as loopback:
            fetching = fetch(Fetcher(OPEN, resolver=names(a=[PUBLIC]), connector=loopback), "http://a.example/")
            if allowed:
                assert await fetching == b"ok"
            else:
                with pytest.raises(InputError, match="too many redirects: at most 3"):
                    await fetching


@pytest.mark.parametrize(
    "target", ["http://inside.example/", "file:///etc/passwd", "http://a.example:22/", "//u@a.example/", "//xn--a/"]
)
async def test_redirects_are_checked_like_the_first_url(target: str) -> None:
    async with server(redirector(target, 1)) as loopback:
        resolver = names(a=[PUBLIC], inside=["10.0.0.5"])
        with pytest.raises(InputError):
            await fetch(Fetcher(OPEN, resolver=resolver, connector=loopback), "http://a.example/")
    assert loopback.asked == [(PUBLIC, 80)]


async def test_size_is_checked_while_reading() -> None:
    async def endless(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
        for _ in range(10_000):
            writer.write(bytes(10_000))
            await writer.drain()

    for answer in (endless, says("200 OK\r\nContent-Length: 1001", bytes(1001))):
        async with server(answer) as loopback:
            with pytest.raises(InputError, match="at most 1000 bytes"):
                await fetch(Fetcher(OPEN, resolver=names(a=[PUBLIC]), connector=loopback), "http://a.example/")


async def test_deadline_bounds_everything() -> None:
    async def trickle(_: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n")
        for _ in range(100):
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(0.05)

    async with server(trickle) as loopback:
        fetcher = Fetcher(OPEN, resolver=names(a=[PUBLIC]), connector=loopback)
        with pytest.raises(InputError, match=r"within 0\.3 seconds"):
            await fetch(fetcher, "http://a.example/", seconds=0.3)


@pytest.mark.parametrize(
    "head", ["404 Not Found", "500 Oh", "200 OK\r\nContent-Encoding: gzip", "204 No Content", "302 Found", "nonsense"]
)
async def test_answers_that_are_no_media(head: str) -> None:
    async with server(says(head)) as loopback:
        with pytest.raises(InputError):
            await fetch(Fetcher(OPEN, resolver=names(a=[PUBLIC]), connector=loopback), "http://a.example/")


class SlowNames:
    """In place of socket.getaddrinfo: nothing of `slow-` is found, and that not before `answer` is set; the rest is
    public."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[str] = []
        self.answer = threading.Event()
        monkeypatch.setattr(socket, "getaddrinfo", self._look_up)

    def _look_up(self, host: str, port: int, **options: Any) -> list[Any]:
        self.asked.append(host)
        if host.startswith("slow-"):
            assert self.answer.wait(GENEROUS)
            raise OSError("no such host")
        return [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (PUBLIC, port))]

    def fetched(self, fetcher: Fetcher, count: int, client: str) -> list[asyncio.Task[bytes]]:
        urls = [f"http://slow-{client}-{number}.example/" for number in range(count)]
        return [
            asyncio.create_task(fetcher.fetch(url, field="f", max_bytes=10, seconds=GENEROUS, client=client))
            for url in urls
        ]


async def test_names_that_take_long_hold_up_no_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    names, fetcher = SlowNames(monkeypatch), Fetcher(OPEN)
    clients = RESOLVED_AT_ONCE // RESOLVED_FOR_ONE + 1
    fetches = [task for n in range(clients) for task in names.fetched(fetcher, RESOLVED_FOR_ONE, f"{n}")]
    await until(lambda: len(names.asked) >= RESOLVED_AT_ONCE)
    async with asyncio.timeout(GENEROUS):
        assert await asyncio.to_thread(lambda: "a thread of the loop is free")
    assert len(names.asked) == RESOLVED_AT_ONCE
    names.answer.set()
    await ended(fetcher, fetches)
    assert len(names.asked) == len(fetches)


async def test_names_that_take_long_hold_up_no_other_client(monkeypatch: pytest.MonkeyPatch) -> None:
    """A look-up goes on after its request has left, for as long as a name server likes, and ends without a word."""
    names, logged = SlowNames(monkeypatch), list[dict[str, Any]]()
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: logged.append(context))
    async with server(says("200 OK\r\nContent-Length: 2", b"ok")) as loopback:
        fetcher = Fetcher(OPEN, connector=loopback)
        left = names.fetched(fetcher, RESOLVED_FOR_ONE, "many")
        await until(lambda: len(names.asked) == RESOLVED_FOR_ONE)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        stays = names.fetched(fetcher, 1, "many")
        assert (
            await fetcher.fetch("http://a.example/", field="f", max_bytes=10, seconds=GENEROUS, client="one") == b"ok"
        )
        assert names.asked[RESOLVED_FOR_ONE:] == ["a.example"], "the look-ups that nobody waits for still count"
        names.answer.set()
        await ended(fetcher, stays)
        assert names.asked[-1] == "slow-many-0.example"
    await until(lambda: asyncio.all_tasks() == {asyncio.current_task()})
    del left, task
    gc.collect()
    assert not logged


class Held(httpcore.AsyncNetworkBackend):
    """Hosts that do not answer until `answer` is set, and then refuse."""

    def __init__(self) -> None:
        self.answer = asyncio.Event()
        self.asked = 0

    async def connect_tcp(self, host, port, timeout=None, local_address=None, socket_options=None):  # noqa: ASYNC109
        self.asked += 1
        await self.answer.wait()
        raise httpcore.ConnectError


def fetches(fetcher: Fetcher, count: int, client: str, seconds: float = GENEROUS) -> list[asyncio.Task[bytes]]:
    return [
        asyncio.create_task(fetcher.fetch("http://a.example/", field="f", max_bytes=10, seconds=seconds, client=client))
        for _ in range(count)
    ]


async def ended(fetcher: Fetcher, tasks: list[asyncio.Task[bytes]]) -> None:
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(outcome, InputError) and "could not be fetched" in str(outcome) for outcome in outcomes)
    await fetcher.close()


async def test_hosts_that_do_not_answer_keep_one_client_waiting_and_no_other() -> None:
    hosts = Held()
    fetcher = Fetcher(OPEN, resolver=names(a=[PUBLIC]), connector=hosts)
    tasks = fetches(fetcher, 2 * FETCHED_FOR_ONE, "many")
    await until(lambda: hosts.asked >= FETCHED_FOR_ONE)
    tasks += fetches(fetcher, 1, "one")
    await until(lambda: hosts.asked == FETCHED_FOR_ONE + 1)
    for number in range(FETCHED_AT_ONCE // FETCHED_FOR_ONE):
        tasks += fetches(fetcher, FETCHED_FOR_ONE, f"other {number}")
    await until(lambda: hosts.asked >= FETCHED_AT_ONCE)
    for _ in range(100):
        await asyncio.sleep(0)
    assert hosts.asked == FETCHED_AT_ONCE
    hosts.answer.set()
    await ended(fetcher, tasks)
    assert hosts.asked == len(tasks)


async def test_the_time_of_a_url_begins_with_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FETCHED_FOR_ONE", 1)
    hosts = Held()
    fetcher = Fetcher(OPEN, resolver=names(a=[PUBLIC]), connector=hosts)
    first = fetches(fetcher, 1, "a")
    await until(lambda: hosts.asked == 1)
    (second,) = fetches(fetcher, 1, "a", seconds=0.0)
    for _ in range(100):
        await asyncio.sleep(0)
    assert not second.done()
    hosts.answer.set()
    with pytest.raises(InputError, match="within 0 seconds"):
        await second
    await ended(fetcher, first)


async def test_a_turn_that_does_not_come_is_no_fault_of_the_url(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FETCHED_FOR_ONE", 1)
    hosts = Held()
    fetcher = Fetcher(OPEN, resolver=names(a=[PUBLIC]), connector=hosts)
    tasks = fetches(fetcher, 1, "a")
    await until(lambda: hosts.asked == 1)
    with monkeypatch.context() as patched:
        patched.setattr(module, "TURN_SECONDS", 0.01)
        (second,) = fetches(fetcher, 1, "a")
        with pytest.raises(FetchesBusy, match=r"^f: not fetched: other URLs were, for 0\.01 seconds; retry shortly\.$"):
            await second
    tasks += fetches(fetcher, 1, "a")  # the turn that nobody waits for is not lost
    hosts.answer.set()
    await ended(fetcher, tasks)
    assert hosts.asked == 2


ODD = (
    *("https://xn--/", "https://xn--a/", "https://xn--zzzzzzzz99999/", "https://" + "a" * 64 + ".example/"),
    *("https://-a.example/", "https://\u2488/", "https://a\u200bb.example/", "https://\ud800/", "https://[::1/"),
    *("https://[v1.x]/", "https://a.example:99999/", "https://a.example:-1/", "https:///x", "https:", "//", ""),
)
LETTERS = st.sampled_from("https://@[]:.%?#\\ \t\n\x00-xn0aé\u2488\u200d\uff0e\ud800")


@pytest.mark.parametrize("policy", [OPEN, UrlPolicy("allowlist", frozenset({"a.example"}))], ids=["public", "listed"])
async def test_odd_urls_are_refused(policy: UrlPolicy) -> None:
    for url in ODD:
        connector = Unreachable()
        with pytest.raises(InputError):
            await fetch(Fetcher(policy, resolver=names(a=[PUBLIC]), connector=connector), url)
        assert connector.asked == []


@settings(deadline=None)
@given(rest=st.text(LETTERS, max_size=20))
async def test_no_url_does_more_than_be_refused(rest: str) -> None:
    with pytest.raises(InputError):
        await fetch(Fetcher(OPEN, resolver=names(a=[PUBLIC]), connector=Unreachable()), f"https://{rest}")


@pytest.mark.parametrize(
    "address",
    [
        *("127.0.0.1", "0.0.0.0", "10.1.2.3", "100.64.0.1", "169.254.169.254", "172.31.255.255", "192.0.0.192"),
        *("192.168.1.1", "198.19.0.1", "224.0.0.1", "240.0.0.1", "255.255.255.255", "::", "::1", "::ffff:8.8.8.8"),
        *("::ffff:127.0.0.1", "64:ff9b::a00:1", "64:ff9b:1::1", "2002:7f00:1::", "fc00::1", "fe80::1", "fe80::1%eth0"),
        *("fec0::1", "ff02::1", "2001:db8::1", "2001::1", "2606:4700::1%1", "", "localhost", "2130706433", "0x7f.1"),
    ],
)
def test_refused(address: str) -> None:
    assert not is_public(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700::", "2a00:1450:4001::200e", "172.32.0.1"])
def test_allowed(address: str) -> None:
    assert is_public(address)


@given(st.integers(0, 2**32 - 1))
def test_no_ipv4_address_gets_through_as_an_ipv6_one(packed: int) -> None:
    for prefix in (0, 0xFFFF << 32, int(ip_address("64:ff9b::"))):
        assert not is_public(str(IPv6Address(prefix | packed)))


@pytest.mark.parametrize(
    "url", ["data:", "data:image/png,abc", "data:base64,abc", "data:;base64" + "x" * 300 + ",", "https://x/y,z"]
)
def test_other_forms_are_refused(url: str) -> None:
    with pytest.raises(InputError, match="data URL") as caught:
        payload_of(url, field="f")
    assert caught.value.field == "f"


@pytest.mark.parametrize("payload", ["ab", "ab=c", "a b=", "ab\n=", "äöü=", "????", "a-b-c", "%41AAA", "AA%3", "%"])
def test_base64_is_strict(payload: str) -> None:
    with pytest.raises(InputError, match="base64"):
        decode_base64(payload, field="f", max_bytes=100)


@pytest.mark.parametrize("size", [198, 199, 200])
def test_every_spelling_of_base64_is_taken(size: int) -> None:
    """Python's urlsafe_b64encode, JavaScript's base64url without padding, URLs that were percent-encoded, and lines."""
    data = bytes(range(255, 255 - size, -1))
    standard, safe = base64.b64encode(data).decode(), base64.urlsafe_b64encode(data).decode()
    escaped = quote(standard, safe="")
    lower = re.sub("%..", lambda code: code[0].lower(), escaped)
    lines = [standard[at : at + 76] for at in range(0, len(standard), 76)]
    wrapped = [space + space.join(lines) + space for space in ("\n", "\r\n", " ", "\t", "\f", "\v")]
    assert len({standard, safe, escaped}) == 3
    for spelling in (standard, safe, safe.rstrip("="), escaped, lower, *wrapped):
        url = "Data:image/PNG;charset=x;base64," + spelling
        assert declared_type(url) == "image/png"
        assert decode_base64(payload_of(url, field="f"), field="f", max_bytes=len(spelling)) == data


def test_length_is_checked_before_decoding() -> None:
    assert decode_base64("AAAA", field="f", max_bytes=3) == bytes(3)
    with pytest.raises(InputError, match="at most 3 bytes"):
        decode_base64("AAAAAAA!", field="f", max_bytes=3)
    with pytest.raises(InputError, match="at most 2 bytes"):
        decode_base64("AAAA", field="f", max_bytes=2)
