"""What the engine process is started with, from the settings and the hosted models."""

from __future__ import annotations

from typing import Literal

from service.catalog import Catalog
from service.link.config import EngineConfig, ModelConfig
from service.settings import Settings

COMPUTED = frozenset({"models", "log_format"})
"""Fields of EngineConfig that are not copied: the catalog's models, and the format that "auto" stands for."""


def engine_config(settings: Settings, catalog: Catalog, log_format: Literal["text", "json"]) -> EngineConfig:
    """Copies the settings that EngineConfig has a field of the same name for."""
    models = tuple(
        ModelConfig(model.name, str(model.checkpoint.directory), settings.dtype, settings.load_format)
        for model in catalog.models
    )
    copied = {name: getattr(settings, name) for name in EngineConfig.__struct_fields__ if name not in COMPUTED}
    return EngineConfig(models=models, log_format=log_format, **copied)
