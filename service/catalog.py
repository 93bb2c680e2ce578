"""The models that a server hosts, as the API process knows them: names, directories and processors. Torch-free."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import models
from models.errors import CheckpointError
from models.processor import ChatProcessor, SpeechProcessor
from models.registry import family_of, resolve
from service.engine.config import EngineConfig, ModelConfig
from service.hub import Checkpoint, locate
from service.settings import Settings

EMBEDDED = Path(models.__file__).parent / "embedded"
DEMO_NOTICE = "untrained demo weights: answers are noise"


@dataclass(frozen=True, eq=False)
class HostedModel:
    """names: served names, the first is the one in answers and metrics. demo: an untrained embedded default."""

    names: tuple[str, ...]
    kind: Literal["chat", "speech"]
    checkpoint: Checkpoint
    processor: Any
    created: int
    demo: bool = False

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def chat_processor(self) -> ChatProcessor:
        return cast(ChatProcessor, self.processor)

    @property
    def speech_processor(self) -> SpeechProcessor:
        return cast(SpeechProcessor, self.processor)


class Catalog:
    """Hosted models by served name."""

    def __init__(self, hosted: Sequence[HostedModel]) -> None:
        self.models = tuple(hosted)
        self._by_name: dict[str, HostedModel] = {}
        for model in hosted:
            for name in model.names:
                if name in self._by_name:
                    raise CheckpointError(f"served_model_name: {name!r} names two models")
                self._by_name[name] = model

    def get(self, name: str) -> HostedModel | None:
        return self._by_name.get(name)

    def names(self) -> list[str]:
        return list(self._by_name)


def load_catalog(settings: Settings, report: Callable[[str], None] = lambda line: None) -> Catalog:
    """Locate every model and load its processor. CheckpointError names the model that cannot be hosted."""
    demo = not settings.model
    sources = settings.model or embedded_models()
    aliases = _aliases(settings.served_model_name, settings.model)
    hosted = []
    for source in sources:
        report(f"{source}: locating")
        checkpoint = locate(source, settings.revision, settings.load_format)
        family = family_of(checkpoint.directory)
        report(f"{source}: reading tokenizer and processor ({family.name})")
        processor = resolve(family.processor)(checkpoint.directory)
        names = aliases.get(source) or (_default_name(checkpoint, demo),)
        hosted.append(HostedModel(names, family.kind, checkpoint, processor, int(time.time()), demo))
    return Catalog(hosted)


def embedded_models() -> tuple[str, ...]:
    """Directories of the checkpoints inside the package; CheckpointError when there are none."""
    found = tuple(str(path.parent) for path in sorted(EMBEDDED.glob("*/config.json")))
    if not found:
        raise CheckpointError(f"{EMBEDDED}: the embedded models are missing; name one with --model")
    return found


def _default_name(checkpoint: Checkpoint, demo: bool) -> str:
    if demo:
        return f"reprise/{checkpoint.directory.name}"
    return checkpoint.directory.name if checkpoint.revision is None else checkpoint.source


def _aliases(served: Sequence[str], sources: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """MODEL=ALIAS[,ALIAS] by model; ALIAS[,ALIAS] is for the only one."""
    aliases: dict[str, tuple[str, ...]] = {}
    for entry in served:
        source, separator, names = entry.rpartition("=")
        source = source if separator else next(iter(sources), "")
        if source not in sources:
            raise CheckpointError(f"served_model_name: {source!r} is not one of the models {list(sources)}")
        aliases[source] = aliases.get(source, ()) + tuple(name for name in names.split(",") if name)
    return aliases


def engine_config(settings: Settings, catalog: Catalog, log_format: Literal["text", "json"]) -> EngineConfig:
    """What the engine process is started with."""
    return EngineConfig(
        models=tuple(
            ModelConfig(model.name, str(model.checkpoint.directory), settings.dtype, settings.load_format)
            for model in catalog.models
        ),
        device=settings.device,
        memory_share=settings.memory_share,
        page_size=settings.page_size,
        kv_cache_tokens=settings.kv_cache_tokens,
        max_running=settings.max_running,
        max_waiting=settings.max_waiting,
        queue_timeout=settings.queue_timeout,
        max_step_tokens=settings.max_step_tokens,
        graphs=settings.graphs,
        graph_memory_bytes=settings.graph_memory,
        encoder_cache_bytes=settings.encoder_cache,
        encoder_buckets=settings.encoder_buckets,
        decode_buckets=settings.decode_buckets,
        first_audio_target=settings.first_audio_target,
        max_speech_load=settings.max_speech_load,
        log_level=settings.log_level,
        log_format=log_format,
    )
