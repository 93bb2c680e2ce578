"""Ports for programs that bind late."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from types import SimpleNamespace

import pytest

from benchmarks.servers import ports
from benchmarks.servers.ports import LOOPBACK, reserved_port


def test_a_port_is_nobody_elses_until_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it is not bound, and everybody looks at the same ones first."""
    in_order = SimpleNamespace(sample=lambda among, count: list(among))
    monkeypatch.setattr(ports, "random", SimpleNamespace(SystemRandom=lambda: in_order))
    with ExitStack() as stack:
        found = [stack.enter_context(reserved_port()) for _ in range(4)]
        assert len(set(found)) == 4
        with socket.create_server((LOOPBACK, found[0])):
            pass
