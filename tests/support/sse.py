"""Server-sent events as a client reads them."""

from __future__ import annotations


def sse_events(text: str) -> list[str]:
    """The blocks of a stream. Comments are left out: a server that has been silent sends them, so it depends on the
    machine's speed whether there are any."""
    return [block for block in text.split("\n\n") if block and not block.startswith(":")]
