"""Thousands of requests of every kind leave nothing behind."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.churn import GROWTH_RATIO, churn, faults
from benchmarks.servers.footprint import Footprint
from service.hub import EMBEDDED
from tests.support import miniature

REQUESTS = 3000
CLIENTS = 8
IDLE = Footprint(
    processes={"api": 1, "engine": 1},
    descriptors={"api": 24, "engine": 10},
    threads={"api": 19, "engine": 6},
    resident_bytes={"api": 200 << 20, "engine": 600 << 20},
    files=frozenset(),
    busy=(),
    tasks=7,
)


def test_what_did_not_return_is_named() -> None:
    assert faults(IDLE, IDLE) == []
    within = replace(IDLE, resident_bytes={"api": int((200 << 20) * (1 + GROWTH_RATIO)), "engine": 500 << 20})
    assert faults(IDLE, within) == []
    held = replace(
        IDLE,
        busy=('reprise_slots_used{model="m"} 1.0',),
        files=frozenset({"/dev/shm/x"}),
        descriptors={"api": 25, "engine": 10},
        tasks=9,
        resident_bytes={"api": 200 << 20, "engine": 640 << 20},
    )
    assert faults(IDLE, held) == [
        'gauge reprise_slots_used{model="m"} 1.0',
        "file /dev/shm/x",
        "descriptors of api: 24 -> 25",
        "tasks: 7 -> 9",
        f"resident bytes of engine: {600 << 20} -> {640 << 20}",
    ]


@pytest.mark.slow
def test_thousands_of_requests_leave_nothing_behind() -> None:
    result = churn(REQUESTS, CLIENTS, ["--model", str(EMBEDDED / "qwen2_vl"), "--model", str(miniature.talker())])
    assert result["faults"] == []
    counts = {row["kind"]: row["requests"] for row in result["rows"]}
    assert len(counts) == 16 and sum(counts.values()) == REQUESTS, "each kind of request was sent"
