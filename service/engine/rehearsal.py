"""A rehearsal before the start: a model's passes with kernels that are compiled but not launched, on every processor.

A pass meets its kernels one by one, and each holds it up for a second or two when Triton's cache has it not yet. Here a
launch only asks for the compilation, which goes on in a thread: nearly all of a compilation runs outside of Python. A
mark in the cache says that a start like this one need not rehearse again.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.overrides import TorchFunctionMode

import models
import service
from service.engine.config import EngineConfig
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


def mark_of(directory: Path, dtype: torch.dtype, config: EngineConfig, device_name: str) -> Path:
    """The file in Triton's cache that says of a model in `directory` that its kernels were compiled there before: by
    these sources and versions, for this device, model and engine. Whoever empties the cache removes it, too."""
    import triton
    from triton import knobs

    sources = [Path(folder) for package in (models, service) for folder in package.__path__]
    digest = hashlib.sha256()
    for path in [*(path for folder in sources for path in sorted(folder.rglob("*.py"))), directory / "config.json"]:
        digest.update(path.read_bytes())
    others = msgspec.structs.replace(config, models=())
    digest.update(repr((torch.__version__, triton.__version__, device_name, dtype, others)).encode())
    return Path(knobs.cache.dir) / f"reprise-{digest.hexdigest()[:32]}.rehearsed"


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


def rehearse(worker: ModelWorker, mark: Path) -> None:
    """Every pass of a start, and the mark of it. The worker is of no use afterwards: its state and its measurements are
    those of zeros."""
    began = time.monotonic()
    with compiling():
        worker.allocate(_PAGES)
        worker.measure()
        worker.warm_up()
        passed = time.monotonic() - began
    log.info("kernels of %s: asked for in %.1f s, there in %.1f s", worker.name, passed, time.monotonic() - began)
    with suppress(OSError):  # a cache that cannot be written to holds no kernels either
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
