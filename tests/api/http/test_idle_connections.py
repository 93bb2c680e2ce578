"""Connections between two requests: how long they stay, who has to go when there are too many, how they end."""

from __future__ import annotations

import resource
import threading
from typing import Any

import pytest

from service.system.children import possible_connections
from tests.api.http.raw import GET_HEALTH, chat_request, connect, read_answer, read_to_end, send
from tests.support.servers import RunningServer, running_server
from tests.support.waiting import GENEROUS


def on_loop(server: RunningServer, step: Any) -> Any:
    """The result of a function that is called in the server's event loop."""
    done = threading.Event()
    result: list[Any] = []

    def call() -> None:
        result.append(step())
        done.set()

    server.loop.call_soon_threadsafe(call)
    assert done.wait(GENEROUS)
    return result[0]


def test_they_are_closed_after_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.processes.server.IDLE_TIMEOUT", 0.3)
    with running_server() as server, send(server, GET_HEALTH) as connection:
        assert "connection" not in read_answer(connection).headers
        assert read_to_end(connection) == b""


def test_half_a_head_behind_a_request_has_the_time_of_a_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.processes.server.HEADER_TIMEOUT", 2)
    with (
        running_server() as server,
        send(server, GET_HEALTH + b"GET /hea") as connection,
    ):
        assert read_answer(connection).status == 200
        assert read_to_end(connection) == b""


def test_a_body_that_does_not_come_ends_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.api.http.middleware.BODY_TIMEOUT", 0.3)
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 500\r\n\r\n{"
    with running_server() as server, send(server, head) as connection:
        answer = read_answer(connection)
        assert answer.status == 408 and answer.headers["connection"] == "close"
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
