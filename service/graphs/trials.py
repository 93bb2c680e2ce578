"""Which route a captured bucket takes where the capture leaves it open: measured on the calls that are served.

What a capture measures runs over fillers. Where that says that eager execution comes near, the first calls of a bucket
take both routes in turn, and the faster one, by the median, is taken from then on. Now and then a call takes the other
route, so that a change is noticed.
"""

from __future__ import annotations

import statistics
from collections import deque

from service.graphs.observations import Route
from service.graphs.pool import RouteSeconds

_NEAR = 1.5
"""A bucket whose eager call takes longer than this many replays at its capture is replayed always."""
_SAMPLES = 5
"""Latest seconds that are kept of each route."""
_ENOUGH = 3
"""Seconds of each route before a choice."""
_GAIN = 0.03
"""The other route must be faster by this share to be taken instead of the one in use."""
_EVERY = 128
"""Calls between two samples of the route that is not in use."""


class RouteTrial:
    """Of one captured bucket. `route` says which route the next call takes, `observe` what a call took."""

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
        """Eager calls fail: every later one is replayed."""
        self._open = False

    def observe(self, route: Route, seconds: float) -> None:
        """The first call of a route, which may allocate and choose kernels, does not count."""
        if route not in self._warm:
            self._warm.add(route)
            return
        self._seconds[route].append(seconds)
        if min(map(len, self._seconds.values())) >= _ENOUGH:
            medians = {name: statistics.median(taken) for name, taken in self._seconds.items()}
            self._current = RouteSeconds(**medians).faster(self._current, gain=_GAIN)
