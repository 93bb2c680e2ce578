"""Numbers in messages."""

from __future__ import annotations


def counted(number: int, thing: str) -> str:
    """(1, "request") -> "1 request"; (2, "request") -> "2 requests"."""
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"
