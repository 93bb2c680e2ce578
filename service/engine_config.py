"""What the engine process is started with, from the settings and the hosted models."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat
from typing import Literal

import msgspec

from service.catalog import Catalog
from service.link.config import EngineConfig, ModelConfig
from service.settings import Settings

COMPUTED = frozenset({"models", "log_format", "restarted"})
"""Fields of EngineConfig that are not copied: the catalog's models, the format that "auto" stands for, and whether
it is a later life of the engine."""


def engine_config(settings: Settings, catalog: Catalog, log_format: Literal["text", "json"]) -> EngineConfig:
    """Copies the settings that EngineConfig has a field of the same name for."""
    models = tuple(
        ModelConfig(model.name, str(model.checkpoint.directory), settings.dtype, settings.load_format)
        for model in catalog.models
    )
    copied = {name: getattr(settings, name) for name in EngineConfig.__struct_fields__ if name not in COMPUTED}
    return EngineConfig(models=models, log_format=log_format, **copied)


def configs_of_lives(config: EngineConfig) -> Iterator[EngineConfig]:
    """What each start of a server's engine is configured with. A first one that fails is not repeated, so every later
    one is a restart."""
    return chain((config,), repeat(msgspec.structs.replace(config, restarted=True)))
