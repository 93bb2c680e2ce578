"""Counts the kernels that Triton compiles and those that the GPU refuses, and logs each compilation while serving.

Triton compiles a kernel when a batch first needs it, and nothing else runs meanwhile. So all kernels are compiled
before readiness (precompile.py) and run once (ModelWorker.warm_up); a compilation in the phase "serving" is one that
both have missed. After a restart the engine runs its kernels only once it is idle. Until then it is in the phase
"start", and kernels are loaded as they are needed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch

from service.graphs.observations import Observations

log = logging.getLogger(__name__)


class Compilations:
    """Compilations of this process, by phase."""

    def __init__(self, observations: Observations) -> None:
        self._phase: Literal["start", "serving"] = "start"
        self._observations = observations
        self._lock = threading.Lock()
        """Precompilation runs in many threads."""

    @contextmanager
    def counted(self, device: torch.device) -> Iterator[None]:
        """Counts what Triton compiles inside this context. For a CPU nothing is imported or counted."""
        if device.type != "cuda":
            yield
            return
        from triton import knobs

        from models.layers.op import FALLBACKS

        before, knobs.compilation.listener = knobs.compilation.listener, self.compiled
        FALLBACKS.listener = self.fell_back
        try:
            yield
        finally:
            knobs.compilation.listener = before
            FALLBACKS.listener = None

    def serve(self) -> None:
        """Starts the phase "serving", since the engine is warm. The counters of this phase start at 0, so that rate()
        sees their first increase."""
        self._phase = "serving"
        for cached in ("true", "false"):
            self._observations.count("kernel_compilations_total", 0.0, phase=self._phase, cached=cached)

    def compiled(self, *, src: Any, metadata: Any, metadata_group: Any, times: Any, cache_hit: bool) -> None:
        """triton.knobs.CompilationListener: a kernel new to this process was compiled or read from Triton's cache."""
        cached = "true" if cache_hit else "false"
        with self._lock:
            self._observations.count("kernel_compilations_total", phase=self._phase, cached=cached)
        if self._phase == "serving":
            how = "read from the cache" if cache_hit else f"compiled in {times.total / 1e6:.2f} s"
            log.warning("kernel %s was %s while serving; it should have been warmed up", src.name, how)

    def fell_back(self, kernel: str) -> None:
        """Counts a kernel that the GPU refused; its reference ran (models.layers.op names it in the log)."""
        self._observations.count("kernel_fallbacks_total", kernel=kernel)
