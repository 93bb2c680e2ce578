"""Kernel precompilation at the first start: a model's steps run once with kernels that are compiled but not launched.

An ordinary run needs its kernels one by one, and waits a second or two for each that is not in Triton's cache. Here a
launch only requests the compilation, which a thread pool does in parallel on all processors (nearly all of it runs
outside Python). A stamp file in the cache says that a start with the same sources and settings can skip this.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch.overrides import TorchFunctionMode

import models
import service
from models.interfaces import cpus
from service.engine.core.worker import ModelWorker
from service.graphs.observations import Observations
from service.link.config import EngineConfig, ModelConfig

log = logging.getLogger(__name__)

# Counts the kernels that Triton compiles and those that the GPU refuses, and logs each compilation while serving.
#
# Triton compiles a kernel when a batch first needs it, and nothing else runs meanwhile. So all kernels are compiled
# before readiness (precompile.py) and run once (ModelWorker.warm_up); a compilation in the phase "serving" is one that
# both have missed. After a restart the engine runs its kernels only once it is idle. Until then it is in the phase
# "start", and kernels are loaded as they are needed.


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


_PAGES = 2
"""The scratch page and one more."""
_MAX_THREADS = 32
"""The compiler takes a few hundred MB in each thread."""
_SAME_KERNELS: dict[str, Any] = {
    "threads": None,
    "gpu": "",
    "gpu_bytes": None,
    "index": None,
    "sharers": 1,
    "restarted": False,
    "log_level": "info",
    "log_format": "text",
}
"""Settings that no kernel depends on. They are left out of the stamp, so that a restart, and each of several engines,
finds what another start has compiled."""
_ALLOCATIONS = (
    torch.empty,
    torch.empty_like,
    torch.empty_strided,
    torch.Tensor.new_empty,
    torch.Tensor.new_empty_strided,
)


def stamp_file(model: ModelConfig, dtype: torch.dtype, config: EngineConfig, device_name: str) -> Path:
    """The file in Triton's cache that says that the kernels of this model are in it, for these sources,
    versions, device and engine settings. Emptying the cache removes it, too."""
    import triton
    from triton import knobs

    from models.layers.kernels import gemm_configs

    sources = [Path(folder) for package in (models, service) for folder in package.__path__]
    digest = hashlib.sha256()
    files = [path for folder in sources for path in sorted(folder.rglob("*.py"))]
    for path in [*files, Path(model.directory) / "config.json"]:
        digest.update(path.read_bytes())
    others = msgspec.structs.replace(config, models=(), **_SAME_KERNELS)
    chosen = gemm_configs.active()
    kinds = dtype, model.quantization
    digest.update(repr((torch.__version__, triton.__version__, device_name, kinds, others, chosen)).encode())
    return Path(knobs.cache.dir) / f"reprise-{digest.hexdigest()[:32]}.precompiled"


class ZeroAllocations(TorchFunctionMode):
    """Fills new tensors with zeros. During precompilation no kernel writes its results, some of which are indices: 0 is
    the scratch slot, the scratch page and a valid token."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func in _ALLOCATIONS else made


@contextmanager
def compiling() -> Iterator[None]:
    """Inside this context, launching a Triton kernel only compiles it. On exit all of these kernels are in this process
    and in the cache on disk. Configurations that do not compile for this GPU, or need more shared memory than it has,
    are refused from then on, and their operations run as the PyTorch reference. Other compiler errors are raised."""
    import triton
    from triton.runtime.jit import JITFunction

    from models.layers.kernels.launch import configuration_of

    run = JITFunction.run
    asked: dict[int, tuple[Any, Any]] = {}
    """Kernel and configuration, by the kernel's id."""

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        made = run(self, *args, grid=grid, warmup=True, **kwargs)
        if id(made) not in asked:
            asked[id(made)] = made, configuration_of(self, args, kwargs)
        return made

    JITFunction.run = compile_only
    threads = min(_MAX_THREADS, cpus.available())
    try:
        with ThreadPoolExecutor(threads) as pool, triton.AsyncCompileMode(pool, ignore_errors=True), ZeroAllocations():
            yield
    finally:
        JITFunction.run = run
    _refuse_unfit(asked.values())


def _refuse_unfit(asked: Iterable[tuple[Any, Any]]) -> None:
    from triton.runtime.errors import OutOfResources

    from models.layers.kernels.gpu import current_gpu
    from models.layers.kernels.launch import refuse, unfit

    available = current_gpu().shared_memory
    for made, configuration in asked:
        try:
            # In AsyncCompileMode a launch returns a future of the kernel.
            kernel = made.result() if hasattr(made, "result") else made
            needed = kernel.metadata.shared
        except Exception as error:
            if not unfit(error):
                raise
            refuse(configuration, error)
            continue
        if needed > available:
            refuse(configuration, OutOfResources(needed, available, "shared memory"))


def precompile(worker: ModelWorker, stamp: Path) -> None:
    """Runs every step of a start, then writes the stamp file. Throw the worker away afterwards: its kernels have
    computed nothing, so its state and measurements are meaningless."""
    began = time.monotonic()
    with compiling():
        worker.allocate(_PAGES)
        worker.measure()
        deque(worker.warm_up(), maxlen=0)
        passed = time.monotonic() - began
    log.info("kernels of %s: requested in %.1f s, compiled in %.1f s", worker.name, passed, time.monotonic() - began)
    with suppress(OSError):  # the cache is not writable, so it holds no kernels either
        stamp.parent.mkdir(parents=True, exist_ok=True)
        stamp.touch()
