"""The engine's record of the grammar of one sequence. Its matcher is in a mask server."""

from __future__ import annotations

import time


class Guide:
    """The state of a matcher that a mask server has.

    number: by which the server knows it. server: index of that server.
    """

    def __init__(self, number: int, server: int) -> None:
        self.number = number
        self.server = server
        self.built = False
        """Whether the matcher was built, or failed: see `problem`."""
        self.problem = ""
        """Why there are no masks; empty if there are."""
        self.begun = time.monotonic()
        """When building the matcher was requested."""
        self.ended = False
        """Whether the answer needs no more masks."""
        self.num_consumed = 0
        """Tokens of the answer that were sent to the matcher."""

    @property
    def seconds(self) -> float:
        """Seconds since building the matcher was requested."""
        return time.monotonic() - self.begun
