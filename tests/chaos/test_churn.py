"""Requests of every kind leave nothing behind."""

from __future__ import annotations

import pytest

from benchmarks.churn import churn
from service.hub import EMBEDDED
from tests.support import miniature

pytestmark = pytest.mark.slow

REQUESTS = 320
"""Twenty of each kind, as many before as during the round that is judged. `python -m benchmarks.churn` sends more."""
CLIENTS = 8


def test_requests_leave_nothing_behind() -> None:
    result = churn(REQUESTS, CLIENTS, ["--model", str(EMBEDDED / "qwen2_vl"), "--model", str(miniature.talker())])
    assert result["faults"] == []
    counts = {row["kind"]: row["requests"] for row in result["rows"]}
    assert len(counts) == 16 and sum(counts.values()) == REQUESTS, "each kind of request was sent"
