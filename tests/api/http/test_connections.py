"""Bodies that are framed past h11's state machine are those that h11 frames."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import h11
import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.types import Message, Receive
from starlette.websockets import WebSocket, WebSocketDisconnect

from service.api.http.admission import FREE_BYTES, Admission
from service.api.http.connections import (
    FREE_CHUNKS,
    FREE_FRAGMENTS,
    MAX_CONTROLS,
    MIN_CHUNK,
    MIN_FRAGMENT,
    TRY_LATER,
    BoundedConnection,
    FastBodyConnection,
)
from service.api.http.errors import ApiError
from service.api.http.middleware import RequestMiddleware
from service.api.sockets import Inbox
from service.api.sockets import close as close_socket
from service.metrics.metrics import Metrics
from service.processes.server import quiet_uvicorn
from service.system.children import possible_connections
from tests.api.http.raw import GET_HEALTH, chat_request, connect, parse, read_answer, read_to_end, send
from tests.support.servers import RunningServer, running_server
from tests.support.waiting import GENEROUS, until, wait

REQUESTS = {
    "1.1": b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 0\r\n\r\n",
    "1.0": b"POST / HTTP/1.0\r\nhost: a\r\ncontent-length: 0\r\n\r\n",
    "head": b"HEAD / HTTP/1.1\r\nhost: a\r\n\r\n",
}


def _answered(connection: h11.Connection, request: bytes, pieces: list[bytes], *, sized: bool) -> list[bytes]:
    """What goes out for each of two answers on one connection, as far as it is kept open."""
    answers: list[bytes] = []
    for _ in range(2):
        connection.receive_data(request)
        while not isinstance(connection.next_event(), h11.EndOfMessage):
            pass
        headers = [(b"Date", b"today"), (b"x-request-id", b"1")]
        headers += [(b"content-length", str(sum(map(len, pieces))).encode())] if sized else []
        sent = [connection.send(h11.Response(status_code=200, headers=headers))]
        sent += [connection.send(h11.Data(data=piece)) for piece in pieces]
        sent.append(connection.send(h11.EndOfMessage()))
        answers.append(b"".join(data or b"" for data in sent))
        if connection.our_state is not h11.DONE:
            break
        connection.start_next_cycle()
    return answers


@pytest.mark.parametrize("request_name", REQUESTS)
@pytest.mark.parametrize("sized", [False, True])
@settings(deadline=None)
@given(pieces=st.lists(st.binary(max_size=40) | st.just(bytes(70_000)), max_size=4))
def test_framing_is_that_of_h11(request_name: str, sized: bool, pieces: list[bytes]) -> None:
    request = REQUESTS[request_name]
    pieces = [b""] if request_name == "head" else pieces
    expected = _answered(h11.Connection(h11.SERVER), request, pieces, sized=sized)
    assert _answered(FastBodyConnection(h11.SERVER, draining=lambda: False), request, pieces, sized=sized) == expected


def test_the_head_goes_out_with_the_first_piece() -> None:
    connection = FastBodyConnection(h11.SERVER, draining=lambda: False)
    connection.receive_data(REQUESTS["1.1"])
    while not isinstance(connection.next_event(), h11.EndOfMessage):
        pass
    assert connection.send(h11.Response(status_code=200, headers=[])) == b""
    first = connection.send(h11.Data(data=b"x"))
    assert first is not None and first.startswith(b"HTTP/1.1 200") and first.endswith(b"\r\n\r\n1\r\nx\r\n")
    assert connection.send(h11.Data(data=b"y")) == b"1\r\ny\r\n"


@pytest.mark.parametrize(("limit", "begun"), [("IDLE_TIMEOUT", b""), ("HEADER_TIMEOUT", b"GET /hea")])
def test_they_are_closed_after_some_time(monkeypatch: pytest.MonkeyPatch, limit: str, begun: bytes) -> None:
    """Half a head behind a request has the time of a head."""
    monkeypatch.setattr(f"service.processes.server.{limit}", 0.3)
    with running_server() as server, send(server, GET_HEALTH + begun) as connection:
        assert "connection" not in read_answer(connection).headers
        assert read_to_end(connection) == b""


def test_requests_that_come_together_are_answered_in_order(server: RunningServer) -> None:
    requests = [chat_request(f"number {index}") for index in range(5)]
    with send(server, b"".join(requests) + GET_HEALTH) as connection:
        for index in range(5):
            assert f"number {index}".encode() in read_answer(connection).body
        assert b'"status":"ok"' in read_answer(connection).body


def test_the_one_that_has_been_idle_for_longest_makes_room() -> None:
    with running_server(max_connections=2) as server:
        first, second = send(server, GET_HEALTH), connect(server)
        assert read_answer(first).status == 200
        second.sendall(GET_HEALTH)
        assert read_answer(second).status == 200
        with first, second, send(server, GET_HEALTH) as third:
            assert read_answer(third).status == 200
            assert read_to_end(first) == b""
            second.sendall(GET_HEALTH)
            assert read_answer(second).status == 200


@pytest.mark.parametrize(("limit", "most"), [(1024, 819), (64, 32), (30, 1), (1, 1)])
def test_connections_leave_descriptors_for_other_things(limit: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    assert possible_connections(4096) == most
    assert possible_connections(1) == 1


def test_answers_of_a_server_that_drains_are_the_last_of_their_connections() -> None:
    with running_server(drain_delay=3600) as server:
        with send(server, GET_HEALTH) as connection:
            assert "connection" not in read_answer(connection).headers
            server.server.drain()
            while not server.context.draining:
                pass
            connection.sendall(GET_HEALTH)
            answer = read_answer(connection)
            assert (answer.status, answer.headers["connection"]) == (200, "close")
            assert read_to_end(connection) == b""
        with send(server, chat_request("hello")) as connection:
            answer = read_answer(connection)
            assert (answer.status, answer.headers["connection"]) == (503, "close")


def test_an_idle_connection_does_not_hold_up_a_shutdown() -> None:
    with running_server() as server, send(server, GET_HEALTH) as connection:
        assert read_answer(connection).status == 200
        server.server.should_exit = True
        assert read_to_end(connection) == b""


UPGRADE = b"host: localhost\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
KEYS = b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
HANDSHAKE = b"GET /v1/audio/speech/stream HTTP/1.1\r\n" + UPGRADE + KEYS
CHAT = b"POST /v1/chat/completions HTTP/1.1\r\n" + UPGRADE

REFUSED = {
    "post with a body": CHAT + b"content-length: 2\r\n\r\n{}",
    "post with a body to come": CHAT + b"content-length: 2\r\n\r\n",
    "post without a length": CHAT + b"\r\n",
    "post with keys": CHAT + KEYS + b"\r\n",
    "chunked post": CHAT + b"transfer-encoding: chunked\r\n\r\n",
    "handshake with a length": HANDSHAKE + b"content-length: 2\r\n\r\n",
    "handshake with a huge length": HANDSHAKE + b"content-length: 99999999999999999999\r\n\r\n",
    "handshake with an encoding": HANDSHAKE + b"transfer-encoding: chunked\r\n\r\n",
    "handshake of HTTP/1.0": HANDSHAKE.replace(b"HTTP/1.1", b"HTTP/1.0") + b"\r\n",
    "delete": HANDSHAKE.replace(b"GET", b"DELETE") + b"\r\n",
    "long line": HANDSHAKE + b"x-long: " + b"y" * 20_000 + b"\r\n\r\n",
    "many lines": HANDSHAKE + b"".join(b"x-%d: y\r\n" % index for index in range(300)) + b"\r\n",
}
POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\n"
CHUNKED = POST.replace(b": a", b": localhost") + b"transfer-encoding: chunked\r\n\r\n"
NO_HTTP = {
    "nonsense": b"nonsense\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "no host": b"GET / HTTP/1.1\r\n\r\n",
    "two hosts": b"GET / HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
    "no header": b"GET / HTTP/1.1\r\nhost: a\r\nbad header\r\n\r\n",
    "two lengths": POST + b"content-length: 1, 2\r\n\r\n",
    "a length of chunks": POST + b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
}
LARGE_HEAD = b"GET / HTTP/1.1\r\nhost: a\r\nx: " + b"y" * 70_000


@pytest.mark.parametrize(
    ("requests", "status", "said"),
    [
        (REFUSED, 400, "WebSocket handshake"),
        (NO_HTTP, 400, "HTTP/1.1"),
        ({"a body that breaks off": CHUNKED + b"zz\r\n"}, 400, ""),
        ({"encoding": POST + b"transfer-encoding: gzip\r\n\r\n"}, 501, "Transfer encodings"),
        ({"unended": LARGE_HEAD, "ended": LARGE_HEAD + b"\r\n\r\n", "line": b"GET /" + LARGE_HEAD}, 431, "64 KiB"),
    ],
    ids=["no handshake", "no HTTP", "broken off", "encoding", "large"],
)
def test_what_cannot_be_read_is_refused_and_closed(
    server: RunningServer, requests: dict[str, bytes], status: int, said: str
) -> None:
    for name, request in requests.items():
        with send(server, request) as connection:
            answer = parse(read_to_end(connection))
        assert (answer.status, answer.headers["connection"]) == (status, "close"), name
        assert said in answer.error["message"], name
    server.wait_idle()


def test_a_body_in_very_many_tiny_chunks_is_refused(server: RunningServer) -> None:
    """Chunks of a byte took the event loop for seconds, in which nobody else was served."""
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "Hello."}], "max_tokens": 1}).encode()

    def chunked(count: int, size: int) -> bytes:
        padded = body.ljust(count * size)
        pieces = [padded[start : start + size] for start in range(0, count * size, size)]
        return CHUNKED + b"".join(b"%x\r\n%b\r\n" % (size, piece) for piece in pieces)

    for count, size in ((FREE_CHUNKS, 1), (2 * FREE_CHUNKS, MIN_CHUNK)):
        with send(server, chunked(count, size) + b"0\r\n\r\n") as connection:
            assert read_answer(connection).status == 200
    with send(server, chunked(FREE_CHUNKS + 1, MIN_CHUNK - 1)) as connection:
        refused = parse(read_to_end(connection))
    assert refused.status == 400 and f"at least {MIN_CHUNK} bytes" in refused.error["message"]
    server.wait_idle()


def test_malformed_requests_take_no_line_of_uvicorns_log(
    server: RunningServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("uvicorn.error")
    monkeypatch.setattr(logger, "filters", [])
    monkeypatch.setattr(logger, "level", logger.level)
    quiet_uvicorn()
    with send(server, b"\xff\r\n\r\n") as connection:
        assert b" 400 " in read_to_end(connection)
    with opened(server) as connection:
        connection.sendall(frame(TEXT, b"\xff"))
        assert (1007).to_bytes(2, "big") in read_to_end(connection)
    assert not [record for record in caplog.records if record.name == "uvicorn.error"]


def test_other_upgrades_are_ignored(server: RunningServer) -> None:
    head = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\n\r\n"
    with send(server, head) as connection:
        assert read_answer(connection).status == 200
        connection.sendall(GET_HEALTH)
        assert read_answer(connection).status == 200


def test_handshakes_that_are_not_answered_hold_no_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there are connections: all are closed when the time of a head is over, the next client is served."""

    async def silent(self: Any, scope: Any, receive: Receive, *rest: Any) -> None:
        while (await receive())["type"] != "websocket.disconnect":
            pass

    serve = RequestMiddleware._serve
    monkeypatch.setattr(RequestMiddleware, "_serve", lambda *a: (silent if a[1]["type"] == "websocket" else serve)(*a))
    monkeypatch.setattr("service.processes.server.HEADER_TIMEOUT", 0.5)
    with running_server(max_connections=20) as server:
        crowd = [send(server, GET_HEALTH + HANDSHAKE + b"\r\n") for _ in range(20)]
        for connection in crowd:
            assert b" 101 " not in read_to_end(connection)
            connection.close()
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_an_accepted_socket_outlives_the_time_of_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which ends when the test says so: on a busy machine not before the handshake is answered."""
    armed: list[BoundedConnection] = []
    monkeypatch.setattr(BoundedConnection, "_arm", lambda connection: armed.append(connection))
    monkeypatch.setattr("service.api.speech.websocket.IDLE", 0.5)
    with running_server() as server, send(server, HANDSHAKE + b"\r\n") as connection:
        assert read_answer(connection).status == 101
        server.loop.call_soon_threadsafe(armed[0]._expire)
        closing = b""
        while b"idle" not in closing and (received := connection.recv(1000)):
            closing += received
        connection.sendall(b"\x88\x80\0\0\0\0")  # a masked frame that agrees
        assert not read_to_end(connection)
    assert b"idle" in closing, "it was cut, not closed for saying nothing"


CONTINUED, TEXT, CLOSE, PING, PONG = 0, 1, 8, 9, 10
POLICY = (1008).to_bytes(2, "big")
"""Why the server closes."""


def begun(size: int, sent: int) -> bytes:
    """The first bytes of a text of a client."""
    return bytes([0x80 | TEXT, 0x80 | 127, *size.to_bytes(8, "big"), 0, 0, 0, 0]) + b" " * sent


def frame(kind: int, data: bytes = b"", *, last: bool = True) -> bytes:
    """Of a client: masked, with a mask that changes nothing."""
    assert len(data) < 126
    return bytes([kind | (0x80 if last else 0), 0x80 | len(data), 0, 0, 0, 0]) + data


@contextmanager
def opened(server: RunningServer) -> Iterator[socket.socket]:
    with send(server, HANDSHAKE + b"\r\n") as connection:
        assert read_answer(connection).status == 101
        yield connection


def close(connection: socket.socket) -> bytes:
    """What comes until the server has closed by the protocol: it waits for the answer to its close frame."""
    connection.settimeout(GENEROUS)
    connection.sendall(frame(TEXT, b'{"type": "session.close"}'))
    received, closed = b"", b"\x88\x02" + (1000).to_bytes(2, "big")
    while closed not in received:
        piece = connection.recv(65536)
        assert piece, received
        received += piece
    connection.sendall(frame(CLOSE, (1000).to_bytes(2, "big")))
    assert read_to_end(connection) == b""
    return received


@pytest.mark.parametrize(("count", "size"), [(FREE_FRAGMENTS, 1), (2 * FREE_FRAGMENTS, MIN_FRAGMENT)])
def test_a_message_may_come_in_fragments(server: RunningServer, count: int, size: int) -> None:
    begun = b"{" + b" " * (size - 1)
    message = frame(TEXT, begun, last=False) + frame(CONTINUED, b" " * size, last=False) * (count - 2)
    with opened(server) as connection:
        connection.sendall(message + frame(CONTINUED, b"}".ljust(size)))
        assert b"must be one of session.config" in close(connection)


TINY = b" " * (MIN_FRAGMENT - 1)
FRAGMENTS = frame(TEXT, TINY, last=False) + frame(CONTINUED, TINY, last=False) * (FREE_FRAGMENTS + 1)


@pytest.mark.parametrize(
    ("frames", "said"),
    [
        (FRAGMENTS, b"fragments"),
        (frame(PING) * (MAX_CONTROLS + 1), b"too many pings or pongs"),
        (frame(PONG) * (MAX_CONTROLS + 1), b"too many pings or pongs"),
    ],
    ids=["fragments", "pings", "pongs"],
)
def test_very_many_tiny_frames_close_the_connection(server: RunningServer, frames: bytes, said: bytes) -> None:
    with opened(server) as connection:
        connection.sendall(frames)
        answer = read_to_end(connection)
    assert POLICY in answer and said in answer
    server.wait_idle()


def test_messages_that_have_not_come_whole_count_as_pending_bytes() -> None:
    limits = {"max_pending_bytes": 560_000, "max_request_pixels": 1000, "max_body": 100_000}
    with running_server(**limits) as server:
        admission = server.context.admission
        with opened(server) as first, opened(server) as second:
            first.sendall(begun(190_000, 150_000))
            wait(lambda: admission.pending_bytes >= 150_000, what="they are counted")
            second.sendall(begun(400_000, 300_000))
            assert read_to_end(second)[2:] == TRY_LATER.to_bytes(2, "big") + b"overloaded"
            first.sendall(b" " * 40_000)
            assert b"The JSON is not valid" in close(first)
            wait(lambda: admission.pending_bytes == 0, what="nothing is left")
        server.wait_idle()


def test_what_comes_after_the_route_has_ended_is_not_kept(server: RunningServer) -> None:
    with opened(server) as connection:
        connection.sendall(frame(TEXT, b'{"type": "session.close"}') + begun(20_000_000, 1_000_000))
        connection.settimeout(GENEROUS)
        with pytest.raises(OSError):
            while connection.send(b" " * 65536):
                pass
    server.wait_idle()
    assert server.context.admission.pending_bytes == 0


LARGE = "x" * (FREE_BYTES + 1)


class Client:
    """What a WebSocket's receive() returns."""

    def __init__(self, *messages: str) -> None:
        self._messages = [{"type": "websocket.receive", "text": message} for message in messages]

    async def receive(self) -> dict[str, Any]:
        return self._messages.pop(0) if self._messages else {"type": "websocket.disconnect"}


def inbox(admission: Admission, *messages: str) -> tuple[Inbox, Callable[[], Awaitable[str | bytes | None]]]:
    """And what takes the next message."""
    made = Inbox(cast(WebSocket, Client(*messages)), admission.ticket("realtime"))
    context: Any = SimpleNamespace(drain_begun=asyncio.Event())
    return made, lambda: made.next_during(context, None, None, busy=False)


async def test_large_messages_are_charged_until_the_next_is_asked_for() -> None:
    admission = Admission(10, 10 * len(LARGE), Metrics({}))
    messages, take = inbox(admission, LARGE, "small", LARGE)
    await until(lambda: admission.pending_bytes == len(LARGE), what="it is read ahead")
    for message in (LARGE, "small", LARGE):
        assert await take() == message
        await asyncio.sleep(0)  # the next one is read
        assert admission.pending_bytes == len(LARGE)
    with pytest.raises(WebSocketDisconnect):
        await take()
    assert admission.pending_bytes == 0
    await messages.close()


async def test_a_message_without_room_comes_as_an_error_after_those_before() -> None:
    admission = Admission(10, 2 * len(LARGE), Metrics({}))
    admission.ticket("chat").grow(1, len(LARGE))
    messages, take = inbox(admission, "small", LARGE, LARGE)
    assert await take() == "small"
    assert await take() == LARGE
    await asyncio.sleep(0)  # the next one is read
    with pytest.raises(ApiError) as refused:
        await take()
    assert (refused.value.status, refused.value.code) == (503, "overloaded")
    await messages.close()


@pytest.mark.parametrize("failure", [OSError, RuntimeError])
async def test_a_client_that_has_gone_when_its_socket_is_closed_is_no_error(failure: type[Exception]) -> None:
    """uvicorn raises OSError from the close frame; starlette makes a WebSocketDisconnect of it, which it would log."""

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        if message["type"] == "websocket.close":
            raise failure

    socket = WebSocket({"type": "websocket", "headers": []}, receive, send)
    await socket.accept()
    await close_socket(socket, 1000, "")
