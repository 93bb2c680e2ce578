"""The configuration of the engine processes, from the settings and the hosted models."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat

import msgspec

from service.hub.catalog import Catalog
from service.link.config import EngineConfig, ModelConfig
from service.settings.reading import SettingsError
from service.settings.settings import Settings
from service.system.gpus import GpuError, chosen_gpus, visible_gpus

COMPUTED = frozenset({"models", "gpu", "gpu_bytes", "index", "sharers", "restarted", "stood_by", "lora_voices"})
"""Fields of EngineConfig that are not copied from Settings: the models of the catalog, what distinguishes one of
several engines, the size of its GPU, how it was started, and a path as text."""
FIXED = frozenset({"page_size", "mixed_route", "lora_slots"})
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
    return settings.api_processes not in ("auto", 1) or settings.engines > 1 or settings.gpus is not None


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
    device = "cuda" if settings.gpus is not None else "cpu" if len(gpus) > 1 else config.device
    several = len(gpus) > 1
    return [
        msgspec.structs.replace(config, device=device, gpu=gpu, index=index if several else None, sharers=len(gpus))
        for index, gpu in enumerate(gpus)
    ]


def configs_of_processes(settings: Settings, catalog: Catalog) -> list[EngineConfig]:
    """The configuration of each engine that has a process of its own."""
    if settings.engine == "inline":
        return []
    return engine_configs(settings, catalog, engine_gpus(settings))


def configs_of_starts(config: EngineConfig) -> Iterator[EngineConfig]:
    """The configuration of each start of an engine, one after the other. A first start that fails is not repeated, so
    every later one is a restart."""
    return chain((config,), repeat(msgspec.structs.replace(config, restarted=True)))
