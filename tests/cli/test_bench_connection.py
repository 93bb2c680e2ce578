"""The connection of a load's lane: what it does when a server closes it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from service.cli.bench.run import summary
from service.cli.bench.traffic import Connection, ConnectionFailed, Record, SpeechLoad, peer_of

ANSWER = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
Handler = Callable[[int, int, asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, bool]]


async def talk(handler: Handler, requests: int) -> tuple[list[bytes], int]:
    """Answers to requests sent one after the other, and the number of connections. handler: by the numbers of the
    connection and of its request, from 0; returns whether the connection stays open."""
    connections = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal connections
        number, connections = connections, connections + 1
        asked = 0
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"content-length: 4" in head and await reader.readexactly(4) == b"text"
            if not await handler(number, asked, reader, writer):
                break
            asked += 1
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        connection = Connection(peer_of(f"http://127.0.0.1:{port}", None), 30.0)
        answers = []
        try:
            for _ in range(requests):
                await connection.request("POST", "/", b"text")
                answers.append(b"".join([piece async for piece in connection.body()]))
        finally:
            connection.close()
    return answers, connections


def test_a_request_on_a_connection_that_the_server_just_closed_is_sent_again() -> None:
    async def handler(connection: int, asked: int, _: Any, writer: asyncio.StreamWriter) -> bool:
        if connection == 0 and asked == 1:
            return False  # As if it had closed the idle connection when the request was on its way.
        writer.write(ANSWER)
        return True

    assert asyncio.run(talk(handler, 3)) == ([b"ok"] * 3, 2)


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\no"], ids=["nothing", "a part"])
def test_an_answer_that_breaks_off_is_a_failure(said: bytes) -> None:
    """Nothing on a new connection, and a part on any: the server has seen that request."""

    async def handler(connection: int, asked: int, _: Any, writer: asyncio.StreamWriter) -> bool:
        last = asked == (1 if said else 0)
        writer.write(said if last else ANSWER)
        return not last

    with pytest.raises(ConnectionFailed):
        asyncio.run(talk(handler, 3))


def test_a_summary_tells_why_requests_failed() -> None:
    load = SpeechLoad(url="http://127.0.0.1:1", model="tts", requests=4, seed=1)
    failed = [Record(0.0, 0, error="failed", message="cut off") for _ in range(2)]
    found = summary(load, [*failed, Record(0.0, 503, error="refused", message="full"), Record(0.0, 200, duration=1.0)])
    assert found["failures"] == {"cut off": 2} and (found["failed"], found["refused"]) == (2, 1)
    assert "failures" not in summary(load, [Record(0.0, 200, duration=1.0)])
