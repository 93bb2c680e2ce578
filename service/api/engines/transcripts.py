"""Transcripts of spoken answers, kept for a while: OpenAI's clients send an answer back only as `audio: {id}`."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

LIFETIME = 3600.0
"""Seconds that a transcript is kept."""
MAX_TRANSCRIPTS = 10_000
MAX_BYTES = 16 << 20
"""Bytes of all transcripts in UTF-8."""


@dataclass(eq=False)
class Transcripts:
    """Transcripts by the answer's id, kept in the API process, or in the supervisor of several. The oldest are dropped
    first: after `lifetime` seconds, or for lack of room."""

    lifetime: float = LIFETIME
    most: int = MAX_TRANSCRIPTS
    most_bytes: int = MAX_BYTES
    clock: Callable[[], float] = time.time
    _kept: OrderedDict[str, tuple[float, str, int]] = field(default_factory=OrderedDict)
    """(when it expires, text, bytes) by id, oldest first."""
    _bytes: int = 0

    def expiry(self) -> int:
        """Unix time until which a transcript that is added now is kept."""
        return int(self.clock() + self.lifetime)

    def add(self, id: str, text: str) -> None:
        """Keep a transcript, unless it is larger than the room for all."""
        size = len(text.encode(errors="replace"))
        if size > self.most_bytes:
            return
        self._discard(id)
        self._kept[id] = self.clock() + self.lifetime, text, size
        self._bytes += size
        self._tidy()

    def find(self, id: str) -> str | None:
        self._tidy()
        found = self._kept.get(id)
        return None if found is None else found[1]

    def _tidy(self) -> None:
        now = self.clock()
        while self._kept:
            oldest = next(iter(self._kept))
            if self._kept[oldest][0] > now and len(self._kept) <= self.most and self._bytes <= self.most_bytes:
                return
            self._discard(oldest)

    def _discard(self, id: str) -> None:
        if (kept := self._kept.pop(id, None)) is not None:
            self._bytes -= kept[2]


class SharedTranscripts(Protocol):
    """The transcripts that the supervisor keeps for several API processes."""

    async def keep(self, id: str, text: str) -> None:
        """When this returns, every process can find the transcript."""

    async def find(self, id: str) -> str | None: ...
