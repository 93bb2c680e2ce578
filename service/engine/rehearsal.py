"""A rehearsal before the start: a model's passes with kernels that are compiled but not launched, on every processor.

A pass meets its kernels one by one, and each holds it up for a second or two when Triton's cache has it not yet. Here a
launch only asks for the compilation, which goes on in a thread: nearly all of a compilation runs outside of Python.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from service.engine.worker import ModelWorker

log = logging.getLogger(__name__)

_PAGES = 2
"""The scratch page and one more."""
_MOST_THREADS = 32
"""Each takes some hundred MB in the compiler."""
_ALLOCATIONS = (
    torch.empty,
    torch.empty_like,
    torch.empty_strided,
    torch.Tensor.new_empty,
    torch.Tensor.new_empty_strided,
)


class ZeroAllocations(TorchFunctionMode):
    """Memory that Python asks for holds zeros. Nothing writes a kernel's results in a rehearsal, and some of them are
    indices: 0 is the scratch slot, the scratch page, a token."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in _ALLOCATIONS else made


@contextmanager
def compiling() -> Iterator[None]:
    """Launches of Triton's kernels only have them compiled. At the end all are, for this process and in the cache on
    disk; an error of the compiler is raised then."""
    import triton
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    JITFunction.run = compile_only
    threads = min(_MOST_THREADS, len(os.sched_getaffinity(0)))
    try:
        with ThreadPoolExecutor(threads) as pool, triton.AsyncCompileMode(pool), ZeroAllocations():
            yield
    finally:
        JITFunction.run = run


def rehearse(worker: ModelWorker) -> None:
    """Every pass of a start. The worker is of no use afterwards: its state and its measurements are those of zeros."""
    began = time.monotonic()
    with compiling():
        worker.allocate(_PAGES)
        worker.measure()
        worker.warm_up()
        passed = time.monotonic() - began
    log.info("kernels of %s: asked for in %.1f s, there in %.1f s", worker.name, passed, time.monotonic() - began)
