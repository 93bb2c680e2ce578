"""Counts the kernels that Triton compiles, and names those that it compiles while requests wait.

A kernel is compiled when the first batch comes that needs it, and nothing else runs meanwhile. What can be needed is
run before readiness (worker.warm_up), and compiled before that (rehearsal.py), so that in the phase "serving" this
counts what was forgotten.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from service.graphs.accounting import Observations

log = logging.getLogger(__name__)


class Compilations:
    """Compilations of this process, by phase."""

    def __init__(self, observations: Observations) -> None:
        self._phase: Literal["start", "serving"] = "start"
        self._observations = observations
        self._lock = threading.Lock()
        """A rehearsal compiles in many threads."""

    @contextmanager
    def counted(self, device: torch.device) -> Iterator[None]:
        """Triton reports to this object inside; nothing is imported or counted for a CPU."""
        if device.type != "cuda":
            yield
            return
        from triton import knobs

        before, knobs.compilation.listener = knobs.compilation.listener, self.compiled
        try:
            yield
        finally:
            knobs.compilation.listener = before

    def serve(self) -> None:
        """The engine is ready. What is counted from now on begins at 0: a rate of what is not there is none."""
        self._phase = "serving"
        for cached in ("true", "false"):
            self._observations.count("kernel_compilations_total", 0.0, phase=self._phase, cached=cached)

    def compiled(self, *, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        """triton.knobs.CompilationListener: a kernel that this process had not, from the compiler or from its cache."""
        cached = "true" if cache_hit else "false"
        with self._lock:
            self._observations.count("kernel_compilations_total", phase=self._phase, cached=cached)
        if self._phase == "serving":
            how = "read from the cache" if cache_hit else f"compiled in {times.total / 1e6:.2f} s"
            log.warning("kernel %s was %s while serving; it should have been warmed up", src.name, how)
