"""Readings of the metrics that the page shows over time, so that it knows what was before it was opened."""

from __future__ import annotations

import asyncio
import time
from collections import deque

import msgspec

from service.metrics.metrics import Metrics

PERIOD = 10.0
"""Seconds between two readings."""
KEPT = 31
"""Readings that are kept: five minutes, some 10 kB each."""
COUNTED = ("requests_total", "admission_rejections_total", "steps_total", "generated_tokens_total")
GAUGES = ("requests_running", "requests_waiting", "kv_cache_pages", "gpu_memory_bytes", "graph_bytes")
DURATIONS = ("time_to_first_token_seconds", "inter_token_duration_seconds", "time_to_first_audio_seconds")
WATCHED = (*COUNTED, *GAUGES, *(f"{name}_bucket" for name in DURATIONS), "audio_generated_seconds_total")


class PastReading(msgspec.Struct, frozen=True):
    """age: seconds. metrics: in Prometheus's text format."""

    age: float
    metrics: str


class History:
    """The readings of the last five minutes."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, bytes]] = deque(maxlen=KEPT)

    async def keep(self, metrics: Metrics) -> None:
        """Read every PERIOD seconds, until it is cancelled."""
        while True:
            self._readings.append((time.monotonic(), metrics.exposition(WATCHED)))
            await asyncio.sleep(PERIOD)

    @property
    def readings(self) -> list[PastReading]:
        """Oldest first."""
        now = time.monotonic()
        return [PastReading(now - at, text.decode()) for at, text in self._readings]
