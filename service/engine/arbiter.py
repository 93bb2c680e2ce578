"""The order in which the workers of one GPU launch.

The worker that has not launched for longest goes first. Its launch gets an allowance: the seconds that the live
listeners of the other workers can wait (their slack). If nothing fits the allowances, the worker with the least slack
launches a step; if a launch of a worker with even less slack is still running, none does. A worker that has been passed
over for long may launch its smallest unit of work anyway: `SHARE` of the GPU is reserved for it, so that overload slows
all models down instead of starving those without live listeners.

A CPU is slower than playback, and a worker without slack would starve the others. So its time is shared: a worker that
waited while others launched goes first until it has had its `fair_share`.

A worker that put work off for launches of others is due: until it has launched, the others wait if they can. A worker
is ahead if all its clients can wait for `AHEAD`: it gives way to one whose clients cannot, but for `AHEAD_SHARE`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from service.engine.core.worker import ModelWorker

SHARE = 0.1
"""Share of the GPU's time that is reserved for a worker that is passed over."""
AHEAD_SHARE = 0.25
"""The same of one that is ahead."""
AHEAD = 1.0
"""Seconds for which the clients of a worker that is ahead can wait, such as listeners with so much audio in hand."""
CPU_SHARE = 0.25
"""Share of a CPU's time that each worker with work gets, if there are no more than four."""
MAX_OWED = 2.0
"""Seconds of its fair share that a worker can be owed."""
MAX_WAIT = 1.0
"""Seconds. No worker is passed over for longer, however long its launch would take."""


@dataclass(frozen=True)
class Candidate:
    """A worker that may launch, and the arguments of its `tick`."""

    worker: ModelWorker
    allowance: float
    must: bool = False


class Arbiter:
    """Knows of each worker when it last launched, and since when it has had work and waited."""

    def __init__(self, workers: Sequence[ModelWorker], *, fair_share: float = 0.0) -> None:
        """fair_share: of the time, for each worker that has work; 0: only SHARE."""
        self._workers = list(workers)
        self._fair_share = min(fair_share, 1 / max(1, len(workers)))
        self._owed: dict[str, float] = dict.fromkeys((worker.name for worker in workers), 0.0)
        """Seconds that each worker lacks of its fair share."""
        self._launched: dict[str, float] = dict.fromkeys((worker.name for worker in workers), -math.inf)
        self._waiting_since: dict[str, float] = {}

    def candidates(self, now: float) -> Iterator[Candidate]:
        """The workers to ask, in this order, until one launches. Empty when no worker has work."""
        ready = [worker for worker in self._workers if worker.has_work()]
        self._waiting_since = {worker.name: self._waiting_since.get(worker.name, now) for worker in ready}
        backlog = sum(worker.backlog(now) for worker in self._workers)
        if self._fair_share and len(ready) > 1:
            first = max(ready, key=lambda worker: self._owed[worker.name])
            if (owed := self._owed[first.name]) > 0:
                yield Candidate(first, max(owed, self._allowance(first, now, backlog)), must=True)
        passing = [worker for worker in ready if self._lets_pass(worker, now, backlog)]
        pressing = [worker for worker in ready if worker not in passing]
        yield from self._order(pressing, now, backlog)
        if all(worker in passing or worker.oldest_launch() is None for worker in self._workers):
            yield from self._order(passing, now, backlog)  # The others have nothing that can be launched yet.

    def _order(self, ready: Sequence[ModelWorker], now: float, backlog: float) -> Iterator[Candidate]:
        """Candidates among these workers, which have work."""
        if not ready:
            return
        for worker in sorted(ready, key=lambda worker: self._launched[worker.name]):
            allowance = self._allowance(worker, now, backlog)
            if allowance > 0:
                yield Candidate(worker, allowance)
            if self._overdue(worker, now):
                yield Candidate(worker, allowance, must=True)
        first = min(ready, key=lambda worker: worker.slack(now))
        if any(other.backlog(now) > 0 and other.slack(now) < first.slack(now) for other in self._workers):
            return
        yield Candidate(first, self._allowance(first, now, backlog), must=True)

    def launched(self, worker: ModelWorker, now: float, seconds: float) -> None:
        """Records that a worker launched work of so many predicted seconds."""
        self._launched[worker.name] = now
        self._waiting_since.pop(worker.name, None)
        for other in self._workers:
            if other is not worker:
                other.others_launched(seconds)
            used = seconds * (self._fair_share - 1.0 if other is worker else self._fair_share)
            owed = self._owed[other.name] + used if other is worker or other.name in self._waiting_since else 0.0
            self._owed[other.name] = max(0.0, min(MAX_OWED, owed))

    def _allowance(self, worker: ModelWorker, now: float, backlog: float) -> float:
        others = (other.slack(now) for other in self._workers if other is not worker)
        return min(others, default=math.inf) - backlog

    def _lets_pass(self, worker: ModelWorker, now: float, backlog: float) -> bool:
        """Whether it waits for another worker. One that has nothing to launch now will have soon, when what it launched
        has run."""
        others = [other for other in self._workers if other is not worker]
        coming = [other for other in others if other.has_work() or other.oldest_launch() is not None]
        ahead = worker.can_wait(now, AHEAD) and any(not other.can_wait(now, AHEAD) for other in coming)
        if ahead and not self._overdue(worker, now, AHEAD_SHARE):
            return True
        due = [other for other in coming if other.due()]
        if not due or worker.due() or self._overdue(worker, now):
            return False
        return worker.can_wait(now, backlog + sum(other.smallest_launch() for other in due))

    def _overdue(self, worker: ModelWorker, now: float, share: float = SHARE) -> bool:
        waited = now - self._waiting_since[worker.name]
        return waited > MAX_WAIT or waited * share > worker.smallest_launch()
