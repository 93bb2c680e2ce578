"""Admission counts the work of all API processes through a table that they share."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator

import pytest

from service.api.engines.shared_usage import UsageTable
from service.api.http.admission import EXCESS, Admission
from service.api.http.errors import ApiError
from service.metrics.metrics import Metrics

KINDS = ("chat", "speech", "other", EXCESS)


@pytest.fixture
def table() -> Iterator[UsageTable]:
    with UsageTable.make_file(2, KINDS) as file:
        yield UsageTable(file.fileno(), 2, KINDS)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no files in memory")
def test_the_table_needs_no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full one has no block for a page of a mapped file: its first use would end the process."""
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with UsageTable.make_file(2, KINDS) as file:
        UsageTable(file.fileno(), 2, KINDS).row(1).tell("chat", 1, 1)
        assert os.fstat(file.fileno()).st_blocks


def admission(table: UsageTable, process: int, shares: dict[str, float] | None = None) -> Admission:
    return Admission(4, 1000, Metrics(), shares, table.row(process))


def test_requests_of_all_processes_count(table: UsageTable) -> None:
    one, other = admission(table, 0), admission(table, 1)
    tickets = [which.ticket("chat") for which in (one, one, other, other)]
    for ticket in tickets:
        ticket.grow(requests=1)
    for which in (one, other):
        with pytest.raises(ApiError, match="Too many requests"):
            which.ticket("speech").grow(requests=1)
    tickets[0].release()
    other.ticket("speech").grow(requests=1)
    assert one.in_flight == 1 and other.in_flight == 3


def test_bytes_of_all_processes_count(table: UsageTable) -> None:
    one, other = admission(table, 0), admission(table, 1)
    one.ticket("chat").grow(1, 700)
    with pytest.raises(ApiError, match="Too many bytes"):
        other.ticket("chat").grow(1, 400)
    other.ticket("chat").grow(1, 300)


def test_what_a_process_held_is_given_back_when_it_has_ended(table: UsageTable) -> None:
    one, other = admission(table, 0), admission(table, 1)
    for _ in range(4):
        one.ticket("chat").grow(1, 100)
    with pytest.raises(ApiError):
        other.ticket("chat").grow(requests=1)
    table.clear(0)
    other.ticket("chat").grow(1, 1000)
