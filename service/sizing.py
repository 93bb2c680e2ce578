"""`reprise serve --dry-run`: the memory of the settings' models on a GPU of the given size, or on this machine's."""

from __future__ import annotations

from pathlib import Path

import torch
from msgspec.structs import replace

from models.checkpoints.weight_files import shard_paths
from models.interfaces.errors import CheckpointError
from service.engine.dry_run import DryRun, dry_run
from service.hub.catalog import load_catalog
from service.link.config import EngineConfig
from service.processes.config import engine_config
from service.settings.reading import GIB, SettingsError, parse_bytes
from service.settings.settings import Settings


def size(settings: Settings, gpu_memory: str | None) -> DryRun:
    """The memory that a start with these settings would use. gpu_memory: size of the GPU, such as 24G; None: that of
    this machine's GPU. Of models on the hub, only configurations and tokenizers are downloaded.

    Raises SettingsError, CheckpointError or ConfigurationError.
    """
    total = _total(gpu_memory)
    catalog = load_catalog(settings.model_copy(update={"load_format": "random"}))
    return dry_run(_checked_where_there_are_files(engine_config(settings, catalog)), total)


def _total(gpu_memory: str | None) -> int:
    if gpu_memory is not None:
        try:
            total = parse_bytes(gpu_memory)
        except ValueError as error:
            raise SettingsError(f"gpu_memory: {error}") from error
        if total < GIB:
            raise SettingsError(f"gpu_memory: {gpu_memory} is less than 1G; 24G is a GPU of 24 GiB")
        return total
    if not torch.cuda.is_available():
        raise SettingsError("gpu_memory: there is no GPU here; name the size of one, as in --gpu-memory 24G")
    return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory


def _checked_where_there_are_files(config: EngineConfig) -> EngineConfig:
    """Headers of weights are read, and so checked, if all models have theirs; published models may have none yet."""
    try:
        for model in config.models:
            shard_paths(Path(model.directory))
    except CheckpointError:
        return replace(config, models=tuple(replace(model, load_format="random") for model in config.models))
    return config
