"""The order in which the workers of one GPU launch.

Least recently launched first, but whatever would delay a live listener's next step past its slack has to wait: the
worker is given the seconds that the others can spare. When nothing fits, the most pressing worker steps, or nobody
while the last launch of that worker is still running. A worker that has been passed over for long gets one launch all
the same, the smallest that it can make: a `SHARE` of the GPU is its own, so that overload slows everybody instead of
starving those without a playback clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from service.engine.worker import ModelWorker

SHARE = 0.1
PATIENCE = 1.0
"""Seconds; nobody waits longer, however long its launch would be."""


class Arbiter:
    def __init__(self, workers: Sequence[ModelWorker]) -> None:
        self._workers = list(workers)
        self._launched: dict[str, float] = dict.fromkeys((worker.name for worker in workers), -math.inf)
        self._waiting_since: dict[str, float] = {}

    def launch(self, now: float) -> bool:
        """Lets one worker launch; False when none has work."""
        ready = [worker for worker in self._workers if worker.has_work()]
        self._waiting_since = {worker.name: self._waiting_since.get(worker.name, now) for worker in ready}
        if not ready:
            return False
        backlog = sum(worker.backlog(now) for worker in self._workers)
        for worker in sorted(ready, key=lambda worker: self._launched[worker.name]):
            allowance = self._allowance(worker, now, backlog)
            if allowance > 0 and worker.tick(now, allowance):
                return self._note(worker, now)
            if self._overdue(worker, now) and worker.tick(now, allowance, must=True):
                return self._note(worker, now)
        pressing = min(ready, key=lambda worker: worker.slack(now))
        if any(other.backlog(now) > 0 and other.slack(now) < pressing.slack(now) for other in self._workers):
            return False
        allowance = self._allowance(pressing, now, backlog)
        return pressing.tick(now, allowance, must=True) and self._note(pressing, now)

    def _allowance(self, worker: ModelWorker, now: float, backlog: float) -> float:
        others = (other.slack(now) for other in self._workers if other is not worker)
        return min(others, default=math.inf) - backlog

    def _overdue(self, worker: ModelWorker, now: float) -> bool:
        waited = now - self._waiting_since[worker.name]
        return waited > PATIENCE or waited * SHARE > worker.least()

    def _note(self, worker: ModelWorker, now: float) -> bool:
        self._launched[worker.name] = now
        self._waiting_since.pop(worker.name, None)
        return True
