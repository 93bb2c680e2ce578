"""A port where nobody listens."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def silent_port() -> Iterator[int]:
    """A TCP port of loopback that refuses who connects. It stays bound until the end, so that nobody else gets it."""
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        yield int(nobody.getsockname()[1])
