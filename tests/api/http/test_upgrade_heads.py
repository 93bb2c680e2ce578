"""Heads that ask for a WebSocket: each is accepted or refused, none holds a connection."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from starlette.types import Receive

from service.api.http.connections import BoundedConnection
from service.api.http.middleware import RequestMiddleware
from tests.api.http.raw import GET_HEALTH, parse, read_answer, read_to_end, send
from tests.api.http.test_idle_connections import on_loop
from tests.support.servers import RunningServer, running_server

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


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_handshake_is_refused_and_closed(server: RunningServer, name: str) -> None:
    with send(server, REFUSED[name]) as connection:
        answer = parse(read_to_end(connection))
    assert answer.status == 400 and answer.headers["connection"] == "close"
    assert "WebSocket handshake" in answer.error["message"]


def test_a_handshake_may_say_that_it_has_no_body(server: RunningServer) -> None:
    with send(server, HANDSHAKE + b"content-length: 0\r\n\r\n") as connection:
        assert read_answer(connection).status == 101


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
    monkeypatch.setattr("service.processes.server.HEADER_TIMEOUT", 2)
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
    monkeypatch.setattr("service.api.speech.websocket.IDLE", 2)
    with running_server() as server, send(server, HANDSHAKE + b"\r\n") as connection:
        assert read_answer(connection).status == 101
        on_loop(server, armed[0]._expire)
        closing = b""
        while b"idle" not in closing and (received := connection.recv(1000)):
            closing += received
        connection.sendall(b"\x88\x80\0\0\0\0")  # a masked frame that agrees
        assert not read_to_end(connection)
    assert b"idle" in closing, "it was cut, not closed for saying nothing"
