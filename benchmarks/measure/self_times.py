"""Self times: how long one thread is in each of several functions, without those that they call."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class SelfTimes:
    """Seconds of a thread by stage, the name that is given to a function."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._open = ["other"]
        self._since = time.perf_counter()

    def _pass(self) -> None:
        now = time.perf_counter()
        self.seconds[self._open[-1]] += now - self._since
        self._since = now

    @contextmanager
    def within(self, stage: str) -> Iterator[None]:
        self._pass()
        self._open.append(stage)
        try:
            yield
        finally:
            self._pass()
            self._open.pop()

    def watch(self, owner: Any, name: str, stage: str) -> None:
        function = getattr(owner, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            self._pass()
            self._open.append(stage)
            try:
                return function(*arguments, **options)
            finally:
                self._pass()
                self._open.pop()

        setattr(owner, name, timed)

    def reset(self) -> None:
        self._pass()
        self.seconds.clear()

    def close(self) -> None:
        """Counts what has passed by now."""
        self._pass()
