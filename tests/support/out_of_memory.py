"""Launches that run out of memory where a test wants them to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

from service.graphs.observations import Observation

MESSAGE = "CUDA out of memory. Tried to allocate 20.00 GiB"


class OutOfMemory:
    """Makes a method run out of memory after it has done its work, so that all it has written is written again.

    chosen: which of its calls, by their arguments. times: how many of those in a row, at first. error: another fault.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        owner: object,
        method: str,
        *,
        chosen: Callable[..., bool] = lambda *args: True,
        times: float = math.inf,
        error: Exception | None = None,
    ) -> None:
        self.failed = 0
        self._left = times
        self._monkeypatch = monkeypatch
        real = getattr(owner, method)

        def failing(*args: Any) -> Any:
            result = real(*args)
            if self._left and chosen(*args):
                self._left -= 1
                self.failed += 1
                raise error or torch.OutOfMemoryError(MESSAGE)
            return result

        monkeypatch.setattr(owner, method, failing)

    def at_first_tries_of(self, owner: object, method: str) -> OutOfMemory:
        """Once in each launch by this other method, and not if that is called again."""
        launch, again, self._left = getattr(owner, method), False, 0

        def tried(*args: Any) -> Any:
            nonlocal again
            self._left, again = int(not again), True
            result = launch(*args)
            self._left, again = 0, False
            return result

        self._monkeypatch.setattr(owner, method, tried)
        return self


def retries(events: Iterable[Observation]) -> dict[tuple[str, str], int]:
    """Second tries by kind and outcome."""
    counts: dict[tuple[str, str], int] = {}
    for event in events:
        if event.name == "memory_retries_total":
            key = event.labels["kind"], event.labels["outcome"]
            counts[key] = counts.get(key, 0) + int(event.value)
    return counts
