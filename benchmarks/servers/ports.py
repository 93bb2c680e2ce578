"""Ports for programs that cannot choose one and say which."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager

LOOPBACK = "127.0.0.1"
CANDIDATES = range(20_000, 30_000)
"""Below the kernel's ephemeral ports, and between the ports of Ray's workers and of its replicas."""


@contextmanager
def reserved_port() -> Iterator[int]:
    """A TCP port of loopback for a program that is started within, and binds it late. Until the end nobody else gets it
    from here, in no process: the UDP port of its number says that it is taken."""
    for port in random.SystemRandom().sample(CANDIDATES, len(CANDIDATES)):
        with socket.socket(type=socket.SOCK_DGRAM) as claim:
            try:
                claim.bind((LOOPBACK, port))
                with socket.socket() as probe:
                    probe.bind((LOOPBACK, port))
            except OSError:
                continue
            yield port
            return
    raise OSError(f"no port of {CANDIDATES} is free")
