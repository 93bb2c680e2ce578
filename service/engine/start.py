"""The start of the engine: device, models, memory, captured graphs; then the loop (engine.py) runs until Stop."""

from __future__ import annotations

import gc
import logging
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import torch

from models.checkpoints.registry import Family, family_of, resolve
from models.layers.kernels.gpu import LEAST_CAPABILITY
from service.engine.core.worker import ModelWorker, StartPhases, WorkerContext
from service.engine.engine import Engine
from service.engine.memory import device_name, device_room, plan_pages, process_age, total_memory, with_gpu_bytes
from service.engine.precompile import Compilations, precompile, stamp_file
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
    config = with_gpu_bytes(config, total_memory(device))
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
