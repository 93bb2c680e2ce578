"""The start of the engine: device, models, kernels, memory, captured graphs; then the loop (engine.py) runs until Stop.

At the first start the kernels are compiled before they are needed: a model's steps run once with kernels that are
compiled but not launched. An ordinary run needs its kernels one by one, and waits a second or two for each that is not
in Triton's cache. Here a launch only requests the compilation, which a thread pool does in parallel on all processors
(nearly all of it runs outside Python). A stamp file in the cache says that a start with the same sources and settings
can skip this.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch.overrides import TorchFunctionMode

import models
import service
from models.checkpoints.registry import Family, family_of, resolve
from models.interfaces import cpus
from models.layers.kernels.gpu import LEAST_CAPABILITY, current_gpu
from service.engine.core.worker import ModelWorker, StartPhases, WorkerContext
from service.engine.engine import Engine
from service.engine.memory import device_name, device_room, plan_pages, process_age, total_memory
from service.graphs.observations import Observations
from service.graphs.pool import GraphPool, claim_workspace
from service.link.config import Channel, ConfigurationError, EngineConfig, ModelConfig
from service.link.engine_link import num_threads
from service.link.messages import EngineState, Outputs

log = logging.getLogger(__name__)

WORKERS = {"chat": "service.engine.chat.worker:ChatWorker", "speech": "service.engine.speech.worker:SpeechWorker"}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

SWITCH_INTERVAL = 1e-4
"""Seconds after which a thread that runs Python code must release the interpreter lock if another one waits for it. The
default of 5 ms is as long as a step or two, and steps wait for other threads: those of masks and of messages."""


def serve(config: EngineConfig, channel: Channel) -> None:
    """The engine from start to end: loads the models, captures, and runs until a Stop command comes."""
    device = resolve_device(config)
    sys.setswitchinterval(SWITCH_INTERVAL)
    torch.set_num_threads(num_threads(config))
    log.info("threads on the host: %d", torch.get_num_threads())
    observations = Observations()
    if (age := process_age()) is not None:
        StartPhases(observations).add("process", age)
    compilations = Compilations(observations)
    with torch.inference_mode(), engine_stream(device), compilations.counted(device):
        engine = build_engine(config, channel, device, observations)
        engine.capture_first(restarted=config.restarted, warmed=compilations.serve)
        # Objects alive now live as long as the process: the garbage collector need not scan them during a step.
        gc.collect()
        gc.freeze()
        engine.run()


def build_engine(config: EngineConfig, channel: Channel, device: torch.device, observations: Observations) -> Engine:
    """Loads the models and divides the memory among them. Call it on the engine's stream, in inference mode."""
    config = msgspec.structs.replace(config, gpu_bytes=total_memory(device))
    claim_workspace(device)
    pool = GraphPool(device, config.graph_bytes)
    phases = StartPhases(observations)
    workers = []
    for model in config.models:
        loading = EngineState("loading", model.name, models=(), graph_bytes=0, device=device_name(device))
        channel.send(Outputs(state=loading))
        started = time.monotonic()
        with phases.timed("load"):
            workers.append(load_worker(config, model, device, pool, observations))
        observations.observe("model_load_duration_seconds", time.monotonic() - started, model=model.name)
    with phases.timed("memory"):
        for name, pages in plan_pages(config, workers, lambda: device_room(device), pool).items():
            next(worker for worker in workers if worker.name == name).allocate(pages)
    return Engine(workers, pool, observations, channel, overlapped=device.type == "cuda")


def load_worker(
    config: EngineConfig, model: ModelConfig, device: torch.device, pool: GraphPool, observations: Observations
) -> ModelWorker:
    """The worker of a model, whose weights it loads. CheckpointError or ConfigurationError names what does not fit."""
    directory = Path(model.directory)
    family = family_of(directory)
    default = torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype = DTYPES.get(model.dtype, default)
    options = _quantised(model, family, device, dtype)
    if config.drafts == "mtp" and family.drafter:
        options["drafter"] = True
    # A published tokenizer takes seconds to read: another thread does it while the weights are loaded.
    with ThreadPoolExecutor(1, thread_name_prefix="tokenizer") as reader:
        processor = reader.submit(resolve(family.processor), directory)
        network = resolve(family.model)(directory, device, dtype, model.load_format, **options)
    if config.drafts == "mtp" and family.kind == "chat" and network.decoder.drafter is None:
        log.warning("%s has no head for drafts: its answers are made without", model.name)
    create: Callable[[WorkerContext], ModelWorker] = partial(
        resolve(WORKERS[family.kind]), model.name, processor.result(), network
    )
    context = WorkerContext(config, device, dtype, pool, observations, time.monotonic)
    if device.type == "cuda":
        _precompile_once(create, context, model)
    return create(context)


def _precompile_once(
    create: Callable[[WorkerContext], ModelWorker], context: WorkerContext, model: ModelConfig
) -> None:
    """Compiles the model's kernels with a worker that is thrown away, unless an earlier start has compiled them."""
    config, device = context.config, context.device
    stamp = stamp_file(model, context.dtype, config, device_name(device))
    if stamp.exists():
        return
    throwaway = replace(
        context,
        config=msgspec.structs.replace(config, restarted=False),
        pool=GraphPool(device, config.graph_bytes),
        observations=Observations(),
    )
    precompile(create(throwaway), stamp)
    gc.collect()
    torch.cuda.empty_cache()


def _quantised(model: ModelConfig, family: Family, device: torch.device, dtype: torch.dtype) -> dict[str, str | bool]:
    """Keyword arguments of load_model. ConfigurationError if the model or its dtype cannot be quantised."""
    if model.quantization == "none":
        return {}
    if family.kind != "chat":
        raise ConfigurationError(f"quantization: {model.name} is a speech model, which stays in 16 bits")
    if device.type == "cuda" and dtype == torch.float32:
        raise ConfigurationError(
            f"quantization: kernels for {model.quantization} take bfloat16 or float16, not float32"
        )
    return {"quantization": model.quantization}


def resolve_device(config: EngineConfig) -> torch.device:
    """The device to compute on; "auto" is the GPU if there is one that the kernels support. ConfigurationError if CUDA
    is requested and there is no such GPU."""
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise ConfigurationError("device: torch finds no CUDA device; `reprise doctor` says what is missing")
    use_cuda = has_cuda and config.device != "cpu"
    if use_cuda and (found := torch.cuda.get_device_capability()) < LEAST_CAPABILITY:
        old = f"{torch.cuda.get_device_name()} has compute capability {found[0]}.{found[1]}; 8.0 is the least"
        if config.device == "cuda":
            raise ConfigurationError(f"device: {old} that kernels are made for; serve with --device cpu")
        log.warning("%s: models run on the CPU", old)
        use_cuda = False
    return torch.device("cuda", torch.cuda.current_device()) if use_cuda else torch.device("cpu")


def engine_stream(device: torch.device) -> AbstractContextManager[object]:
    """The engine's own stream, since graphs cannot be captured on the default one. Its priority is between those of the
    speech codec (service.engine.speech.runner)."""
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device, priority=-1))


# Counts the kernels that Triton compiles and those that the GPU refuses, and logs each compilation while serving.
#
# Triton compiles a kernel when a batch first needs it, and nothing else runs meanwhile. So all kernels are compiled
# before readiness (precompile) and run once (ModelWorker.warm_up); a compilation in the phase "serving" is one that
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
