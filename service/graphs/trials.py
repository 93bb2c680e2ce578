"""Which route a captured bucket takes if its capture could not decide it: measured on calls in service.

A capture is timed on fillers. If eager execution is not much slower there, the first calls of the bucket alternate
between the routes, and the one with the shorter median is taken from then on. Now and then a call takes the other
route, so that a change is noticed.
"""

from __future__ import annotations

import statistics
from collections import deque

from service.graphs.observations import Route
from service.graphs.pool import RouteSeconds

_NEAR = 1.5
"""A bucket is always replayed if its eager call takes longer than this many replays at the capture."""
_SAMPLES = 5
"""Number of latest durations that are kept of each route."""
_ENOUGH = 3
"""Number of durations of each route that a choice needs."""
_GAIN = 0.03
"""The other route must be faster by this share to replace the one in use."""
_EVERY = 128
"""Calls between two samples of the route that is not in use."""


class RouteTrial:
    """The trial of one captured bucket. `route` returns the route of the next call, `observe` records how long a call
    took."""

    def __init__(self, captured: RouteSeconds | None) -> None:
        """captured: seconds at the capture; None without a GPU, where nothing is measured."""
        self._open = captured is not None and captured.eager <= _NEAR * captured.replay
        self._seconds: dict[Route, deque[float]] = {"replay": deque(maxlen=_SAMPLES), "eager": deque(maxlen=_SAMPLES)}
        self._warm: set[Route] = set()
        self._current: Route = "replay"
        self._calls = 0

    def route(self) -> Route:
        if not self._open:
            return "replay"
        self._calls += 1
        other: Route = "eager" if self._current == "replay" else "replay"
        if min(map(len, self._seconds.values())) < _ENOUGH:
            return other if self._calls % 2 == 0 else self._current
        return other if self._calls % _EVERY == 0 else self._current

    def close(self) -> None:
        """Ends the trial because eager calls fail: every later call is replayed."""
        self._open = False

    def observe(self, route: Route, seconds: float) -> None:
        """Records the duration of a call. The first call of a route does not count, since it may allocate and choose
        kernels."""
        if route not in self._warm:
            self._warm.add(route)
            return
        self._seconds[route].append(seconds)
        if min(map(len, self._seconds.values())) >= _ENOUGH:
            medians = {name: statistics.median(taken) for name, taken in self._seconds.items()}
            self._current = RouteSeconds(**medians).faster(self._current, gain=_GAIN)
