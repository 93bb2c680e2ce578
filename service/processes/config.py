"""How many API processes and engines a server starts, and the configuration of each engine.

On an H200 with 32 processors and one engine, four API processes give the first token of 32 streams in 75 instead of
127 ms (docs/performance.md). With few processors, a second process only takes them away from the engine.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import msgspec

from models.interfaces import cpus
from service.hub.catalog import Catalog
from service.link.config import EngineConfig, ModelConfig
from service.settings.reading import SettingsError
from service.settings.settings import Settings
from service.system.gpus import GpuError, chosen_gpus, visible_gpus

COMPUTED = frozenset({"models", "gpu", "gpu_bytes", "index", "sharers", "restarted", "lora_voices"})
"""Fields of EngineConfig that are not copied from Settings: the models of the catalog, what distinguishes one of
several engines, the size of its GPU, how it was started, and a path as text."""
FIXED = frozenset({"page_size", "encoder_buckets", "decode_buckets"})
"""Fields of EngineConfig that only tests and benchmarks set."""


def engine_config(settings: Settings, catalog: Catalog) -> EngineConfig:
    """The configuration of the only engine. Copies each setting for which EngineConfig has a field of the same name."""
    models = tuple(
        ModelConfig(
            model.name,
            str(model.checkpoint.directory),
            settings.dtype,
            settings.load_format,
            settings.quantization if model.kind == "chat" else "none",
        )
        for model in catalog.models
    )
    copied = {name: getattr(settings, name) for name in EngineConfig.__struct_fields__ if name not in COMPUTED | FIXED}
    lora_voices = "" if settings.lora_voices is None else str(settings.lora_voices.expanduser().absolute())
    return EngineConfig(models=models, lora_voices=lora_voices, **copied)


def supervised(settings: Settings) -> bool:
    """Whether there are several engines or API processes, which a supervisor starts. "auto" API processes count as
    one."""
    return settings.num_api_processes > 1 or settings.engines > 1 or settings.gpus is not None


def engine_gpus(settings: Settings) -> tuple[str, ...]:
    """For each engine the GPU that it sees, as CUDA_VISIBLE_DEVICES names it; empty: all that this process sees.
    SettingsError for GPUs that do not exist, and for several engines that would share one.
    """
    try:
        if settings.gpus is not None:
            return chosen_gpus(settings.gpus, visible_gpus())
    except GpuError as error:
        raise SettingsError(str(error)) from error
    if settings.engines > 1 and settings.device == "auto" and visible_gpus():
        raise SettingsError("engines: there is a GPU here, which several would share; add --device cpu, or take --gpus")
    return ("",) * settings.engines


def engine_configs(settings: Settings, catalog: Catalog, gpus: tuple[str, ...]) -> list[EngineConfig]:
    """The configuration of each engine. gpus: see engine_gpus."""
    config = engine_config(settings, catalog)
    several = len(gpus) > 1
    device = "cuda" if settings.gpus is not None else "cpu" if several else config.device
    return [
        msgspec.structs.replace(config, device=device, gpu=gpu, index=index if several else None, sharers=len(gpus))
        for index, gpu in enumerate(gpus)
    ]


PER_ENGINE = 4
MIN_PROCESSORS = 14
"""With fewer processors than this there is one API process."""
PROCESSORS_OF_EACH = 3.5
"""Processors for each API process. It keeps one of them busy; its threads and the engines use the others."""
MAX_AUTO_PROCESSES = 16


@dataclass(frozen=True)
class ApiProcessCount:
    """A number of API processes. reason: why this number, for the log and `reprise doctor`."""

    number: int
    reason: str

    def __str__(self) -> str:
        return f"{self.number} ({self.reason})"


def count_for(settings: Settings, processors: int, gpus: int) -> ApiProcessCount:
    """processors: number that the server may use. gpus: number of GPUs, each with an engine; 0 if engines run on the
    CPU."""
    if settings.api_processes != "auto":
        return ApiProcessCount(settings.api_processes, "the setting")
    if not gpus:
        return ApiProcessCount(1, "the engine computes on the same processors")
    if processors < MIN_PROCESSORS:
        return ApiProcessCount(1, f"fewer than {MIN_PROCESSORS} processors may be used: {processors}")
    number = min(PER_ENGINE * gpus, int(processors / PROCESSORS_OF_EACH), MAX_AUTO_PROCESSES)
    return ApiProcessCount(
        number, f"{processors} processors may be used beside {'a GPU' if gpus == 1 else f'{gpus} GPUs'}"
    )


def api_process_count(settings: Settings) -> ApiProcessCount:
    """The number for this machine. The GPUs are looked up only if the answer depends on them. SettingsError for GPUs
    that the settings name but that do not exist."""
    processors = cpus.available()
    depends = settings.api_processes == "auto" and processors >= MIN_PROCESSORS
    return count_for(settings, processors, _gpus_here(settings) if depends else int(settings.device != "cpu"))


def _gpus_here(settings: Settings) -> int:
    if settings.gpus is not None:
        return len(engine_gpus(settings))
    return int(settings.device != "cpu" and settings.engines == 1 and bool(visible_gpus()))


def with_count(settings: Settings, count: ApiProcessCount) -> Settings:
    """The settings as if that number had been set."""
    return settings.model_copy(update={"api_processes": count.number})


def connections_of_each(settings: Settings) -> int:
    """Each API process's share of max_connections."""
    return ceil(settings.max_connections / settings.num_api_processes)
