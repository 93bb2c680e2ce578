"""Who of several API processes accepts a connection."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from service.api.engines.shared_usage import UsageTable
from service.processes import listener as shared_listener
from service.processes.listener import CONNECTIONS, YIELD_SECONDS, SharedListener


class Process:
    """An API process as the socket sees it."""

    def __init__(self, listening: socket.socket, table: UsageTable, index: int) -> None:
        self.accepted: list[socket.socket] = []
        self.listener = SharedListener(os.dup(listening.fileno()), lambda: len(self.accepted), table.row(index))
        self.listener.setblocking(False)

    def try_to_accept(self) -> bool:
        try:
            connection, _ = self.listener.accept()
        except BlockingIOError:
            return False
        self.accepted.append(connection)
        return True


class Pool:
    def __init__(self, stack: ExitStack, processes: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(shared_listener.time, "monotonic", lambda: self.now)
        monkeypatch.setattr(shared_listener.time, "sleep", lambda seconds: None)
        self._stack = stack
        self._listening = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=64))
        file = stack.enter_context(UsageTable.make_file(processes, (CONNECTIONS,)))
        self.table = UsageTable(file.fileno(), processes, (CONNECTIONS,))
        self.processes = [Process(self._listening, self.table, index) for index in range(processes)]
        for one in self.processes:
            stack.callback(one.listener.close)
            stack.callback(lambda one=one: [connection.close() for connection in one.accepted])
            assert not one.try_to_accept()  # It has told that it has none.

    def connect(self) -> None:
        self._stack.enter_context(socket.create_connection(self._listening.getsockname()))


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pool]:
    with ExitStack() as stack:
        yield Pool(stack, 3, monkeypatch)


def test_connections_are_spread_evenly_whoever_wakes_up_first(pool: Pool) -> None:
    for _ in range(24):
        pool.connect()
        next(one for one in itertools.cycle(pool.processes) if one.try_to_accept())
    assert [len(one.accepted) for one in pool.processes] == [8, 8, 8]


def test_what_no_other_process_accepts_is_accepted_after_a_moment(pool: Pool) -> None:
    first, *_ = pool.processes
    pool.connect()
    assert first.try_to_accept()
    pool.connect()
    for _ in range(3):
        assert not first.try_to_accept()
        pool.now += YIELD_SECONDS / 4
    pool.now += YIELD_SECONDS / 2
    assert first.try_to_accept()


def test_a_process_that_has_ended_or_has_not_begun_is_not_waited_for(pool: Pool) -> None:
    first, second, third = pool.processes
    for one in (first, second):
        pool.connect()
        assert one.try_to_accept()
    pool.connect()
    assert not first.try_to_accept()
    pool.table.clear(pool.processes.index(third))
    assert first.try_to_accept()
