"""Requests as bytes on a socket, for what no client library sends."""

from __future__ import annotations

import json
import socket
from dataclasses import dataclass
from typing import Any

from tests.support.servers import RunningServer
from tests.support.waiting import GENEROUS

GET_HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


@dataclass(frozen=True)
class Answer:
    """headers: by name in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """The error object that every refusal has."""
        assert self.headers["content-type"] == "application/json"
        detail = json.loads(self.body)["error"]
        assert set(detail) == {"message", "type", "param", "code"} and self.headers["x-request-id"]
        return dict(detail)


def connect(server: RunningServer) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").partition(":")
    connection = socket.create_connection((host, int(port)))
    connection.settimeout(GENEROUS)
    return connection


def send(server: RunningServer, data: bytes) -> socket.socket:
    connection = connect(server)
    connection.sendall(data)
    return connection


def read_to_end(connection: socket.socket) -> bytes:
    """What comes until the server closes. TimeoutError when it does not."""
    data = bytearray()
    try:
        while piece := connection.recv(65536):
            data += piece
    except ConnectionResetError:
        pass  # it had not read all that was sent: closed, too
    return bytes(data)


def read_answer(connection: socket.socket) -> Answer:
    """One answer with a Content-Length, and nothing of the one behind it."""
    head = bytearray()
    while not head.endswith(b"\r\n\r\n"):
        head += _some(connection, 1)
    answer = parse(bytes(head))
    length = int(answer.headers.get("content-length", 0))
    body = bytearray()
    while len(body) < length:
        body += _some(connection, length - len(body))
    return Answer(answer.status, answer.headers, bytes(body))


def _some(connection: socket.socket, most: int) -> bytes:
    piece = connection.recv(most)
    assert piece, "the server closed the connection"
    return piece


def parse(data: bytes) -> Answer:
    head, _, body = data.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return Answer(int(first.split()[1]), headers, body)


def chat_request(text: str, **fields: Any) -> bytes:
    """POST /v1/chat/completions to the fake model."""
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body
