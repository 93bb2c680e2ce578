"""A client with hardly any cost: HTTP/1.1 over plain sockets, and nothing is parsed before the answer is complete.

A process of its own reads an Errand from standard input and writes what it saw, a list of Answers as JSON, to standard
output. service.cli.bench measures like a real client, but takes more of a processor than the server that it measures.
"""

from __future__ import annotations

import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from urllib.parse import urlsplit

import msgspec

END = b"0\r\n\r\n"
OUTPUT = b'"content":"'
"""Occurs in every chunk of a chat answer; the first one, with the role, is empty."""


class Errand(msgspec.Struct, frozen=True):
    """Closed loop: `lanes` connections send the bodies in turn until `requests` are answered.

    path: "/v1/chat/completions" or "/v1/audio/speech", whose answers are chunked.
    """

    host: str
    port: int
    path: str
    bodies: list[bytes]
    lanes: int
    requests: int


class Answer(msgspec.Struct, frozen=True):
    """first: seconds to the first token or byte of audio. events: number of those with tokens. reads: number of reads
    of the socket. began, ended: on the machine's monotonic clock."""

    status: int
    began: float
    ended: float
    first: float
    size: int
    events: int
    reads: int


class _Lane:
    """One connection and the answer that it waits for."""

    def __init__(self, errand: Errand) -> None:
        self.socket = socket.create_connection((errand.host, errand.port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._head = f"POST {errand.path} HTTP/1.1\r\nhost: {errand.host}\r\ncontent-type: application/json\r\n"
        self._chat = "chat" in errand.path

    def send(self, body: bytes) -> None:
        self._received: list[bytes] = []
        self._first = 0.0
        request = f"{self._head}content-length: {len(body)}\r\n\r\n".encode() + body
        self._began = time.monotonic()
        self.socket.sendall(request)

    def receive(self) -> Answer | None:
        """The answer once it is complete."""
        data = self.socket.recv(1 << 18)
        self._received.append(data)
        if not self._first:
            self._look_for_first()
        if data and not data.endswith(END):
            return None
        whole = b"".join(self._received)
        status = int(whole[9:12] or 0)
        if status == 200 and not whole.endswith(END):
            return None
        now = time.monotonic()
        events = whole.count(OUTPUT) - whole.count(OUTPUT + b'"')
        return Answer(status, self._began, now, self._first, len(whole), events, len(self._received))

    def _look_for_first(self) -> None:
        head, _, rest = b"".join(self._received).partition(b"\r\n\r\n")
        shown = (rest.count(OUTPUT) > rest.count(OUTPUT + b'"')) if self._chat else len(rest) > 64
        if head and shown:
            self._first = time.monotonic() - self._began


def run(errand: Errand) -> list[Answer]:
    answers: list[Answer] = []
    sent = 0
    with selectors.DefaultSelector() as selector:
        for _ in range(errand.lanes):
            lane = _Lane(errand)
            selector.register(lane.socket, selectors.EVENT_READ, lane)
            lane.send(errand.bodies[sent % len(errand.bodies)])
            sent += 1
        while len(answers) < errand.requests:
            for key, _ in selector.select():
                lane = key.data
                answer = lane.receive()
                if answer is None:
                    continue
                answers.append(answer)
                if sent < errand.requests:
                    lane.send(errand.bodies[sent % len(errand.bodies)])
                    sent += 1
    return answers


@contextmanager
def started(errand: Errand) -> Iterator[subprocess.Popen[bytes]]:
    """A client at work in the background; it is stopped at the end if it has not finished."""
    command = [sys.executable, "-m", "benchmarks.loads.raw_client"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(errand))
        process.stdin.close()
        try:
            yield process
        finally:
            process.kill()


def collect(process: subprocess.Popen[bytes]) -> list[Answer]:
    """Waits for a client to finish. RuntimeError when an answer was not what it should be."""
    assert process.stdout is not None
    answers = msgspec.json.decode(process.stdout.read(), type=list[Answer])
    refused: Sequence[int] = [answer.status for answer in answers if answer.status != 200]
    if refused:
        raise RuntimeError(f"{len(refused)} answers with a status like {refused[0]}")
    return answers


def answers(url: str, bodies: list[bytes], lanes: int, path: str = "/v1/chat/completions") -> list[Answer]:
    """Answers of a server at url to requests, `lanes` at a time, in the order in which they were sent."""
    address = urlsplit(url)
    assert address.hostname is not None and address.port is not None
    errand = Errand(address.hostname, address.port, path, bodies, lanes, len(bodies))
    with started(errand) as process:
        return sorted(collect(process), key=lambda answer: answer.began)


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(run(msgspec.json.decode(sys.stdin.buffer.read(), type=Errand))))
