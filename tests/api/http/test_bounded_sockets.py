"""Tiny frames of a WebSocket neither pile up nor keep the event loop busy."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from service.api.http.connections import FREE_FRAGMENTS, MAX_CONTROLS, MIN_FRAGMENT, TRY_LATER
from tests.api.http.raw import PATIENCE, read_answer, read_to_end, send
from tests.support.servers import RunningServer, running_server
from tests.support.waiting import wait

CONTINUED, TEXT, CLOSE, PING, PONG = 0, 1, 8, 9, 10
CLOSED = b"\x88" + (1008).to_bytes(2, "big")
HANDSHAKE = (
    b"GET /v1/audio/speech/stream HTTP/1.1\r\nhost: localhost\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as server:
        yield server


def begun(size: int, sent: int) -> bytes:
    """The first bytes of a text of a client."""
    return bytes([0x80 | TEXT, 0x80 | 127, *size.to_bytes(8, "big"), 0, 0, 0, 0]) + b" " * sent


def frame(kind: int, data: bytes = b"", *, last: bool = True) -> bytes:
    """Of a client: masked, with a mask that changes nothing."""
    assert len(data) < 126
    return bytes([kind | (0x80 if last else 0), 0x80 | len(data), 0, 0, 0, 0]) + data


@contextmanager
def opened(server: RunningServer) -> Iterator[socket.socket]:
    with send(server, HANDSHAKE) as connection:
        assert read_answer(connection).status == 101
        yield connection


def close(connection: socket.socket) -> bytes:
    """What comes until the server has closed by the protocol: it waits for the answer to its close frame."""
    connection.settimeout(PATIENCE)
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


def test_very_many_tiny_fragments_close_the_connection(server: RunningServer) -> None:
    size = MIN_FRAGMENT - 1
    with opened(server) as connection:
        connection.sendall(frame(TEXT, b" " * size, last=False))
        connection.sendall(frame(CONTINUED, b" " * size, last=False) * (FREE_FRAGMENTS + 1))
        answer = read_to_end(connection)
    assert answer[0] == CLOSED[0] and answer[2:4] == CLOSED[1:] and b"fragments" in answer
    server.wait_idle()


@pytest.mark.parametrize("kind", [PING, PONG])
def test_very_many_control_frames_close_the_connection(server: RunningServer, kind: int) -> None:
    with opened(server) as connection:
        connection.sendall(frame(kind) * (MAX_CONTROLS + 1))
        answer = read_to_end(connection)
    assert CLOSED[1:] + b"too many pings or pongs" in answer
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
        connection.settimeout(PATIENCE)
        with pytest.raises(OSError):
            while connection.send(b" " * 65536):
                pass
    server.wait_idle()
    assert server.context.admission.pending_bytes == 0
