"""The confined workers that decode media."""

from __future__ import annotations

from service.confined.workers import Program, WorkerLimits, WorkerPool
from service.media.messages import Reply

DECODER = Program("service.media.decode_worker", Reply)
LIMITS = WorkerLimits()


def decode_workers(size: int, limits: WorkerLimits = LIMITS) -> WorkerPool:
    return WorkerPool(size, limits, DECODER)
