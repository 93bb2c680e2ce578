"""The limit on this process's open files, and how many connections it has room for."""

from __future__ import annotations

import logging
import resource

log = logging.getLogger(__name__)

MAX_DESCRIPTORS = 1 << 16
DESCRIPTORS_PER_CONNECTION = 1.25
OWN_DESCRIPTORS = 32
"""Uploads, decoding, the engine and its restarts take some, too."""


def attainable_limit() -> int:
    """The limit on open files after raise_descriptor_limit; resource.RLIM_INFINITY if there is none."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return soft
    return max(soft, MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS))


def raise_descriptor_limit() -> None:
    """Raises the soft limit on open files towards the hard one: it is often 1024, fewer than max_connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if (limit := attainable_limit()) != soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def connections_within(limit: int, wanted: int) -> int:
    """How many of the wanted connections a limit on open files has room for; at least one."""
    if limit == resource.RLIM_INFINITY:
        return wanted
    return min(wanted, max(1, min(int(limit / DESCRIPTORS_PER_CONNECTION), limit - OWN_DESCRIPTORS)))


def possible_connections(wanted: int) -> int:
    """At most as many as the limit on open files has room for. At that limit, asyncio would try to accept a connection
    thousands of times a second and log each failure, and an engine that died could not be started again."""
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if (most := connections_within(limit, wanted)) < wanted:
        log.warning("%d open files are allowed, so at most %d connections (max_connections: %d)", limit, most, wanted)
    return most
