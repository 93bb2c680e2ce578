"""The models that a server hosts, for the API process: names, directories and processors. Torch-free."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Literal, cast

from models.checkpoints.registry import family_of, resolve
from models.interfaces.errors import CheckpointError
from models.interfaces.processor import SpeechProcessor
from service.hub import EMBEDDED, OWNER, Checkpoint, embedded, locate
from service.settings.settings import Settings

if TYPE_CHECKING:  # it would take commands a tenth of a second
    from models.text.processor import ChatProcessor

OPENAI_SPEECH_NAMES = ("tts-1", "tts-1-hd", "gpt-4o-mini-tts")
OPENAI_TRANSCRIPTION_NAMES = ("whisper-1", "gpt-transcribe", "gpt-4o-transcribe", "gpt-4o-mini-transcribe")
"""Default models of clients made for OpenAI."""
DATE = re.compile(r"-\d{4}(-\d{2}-\d{2})?\Z")
"""End of the name of a snapshot of OpenAI's: -2025-12-15, or month and day as in tts-1-1106."""
OPENAI_PCM_RATE = 24_000
"""Hz, the rate at which clients made for OpenAI play pcm, which has no header that says it."""
Task = Literal["chat", "speech", "embedding", "rerank", "transcription", "alignment"]
DEMO_NOTICES: dict[Task, str] = {
    "chat": "small demonstration model: knows drawn shapes, colors, counts, charts, printed words and simple motion",
    "speech": "small demonstration voice: one voice under every name, English, best with the thousand words of its "
    "training",
    "transcription": "small demonstration recogniser: knows synthetic voices and the thousand words of its training, "
    "not people at a microphone",
}
"""Notices about the embedded models, by task."""
TASKS: dict[str, Task] = {"qwen3-vl-embedding": "embedding", "qwen3-vl-reranker": "rerank"}
"""By what the name of a checkpoint contains in lower case: its config.json is that of a chat model."""


@dataclass(frozen=True, eq=False)
class HostedModel:
    """A model that requests can name."""

    names: tuple[str, ...]
    """Served names; answers and metrics use the first one."""
    kind: Literal["chat", "speech"]
    checkpoint: Checkpoint
    load: Any
    """Makes the processor, with its tokenizer; None: the family's is read from the checkpoint."""
    created: int
    """Unix time in seconds at which this server located it."""
    demo: bool = False
    """Whether it is one of the embedded models."""
    family_task: Task | None = None
    """What requests ask of its family, if it is not `kind`."""

    @property
    def task(self) -> Task:
        """What requests ask of it."""
        name = PurePath(self.checkpoint.source).name.lower()
        return next((task for part, task in TASKS.items() if part in name), self.family_task or self.kind)

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def root(self) -> str:
        """The repository or folder of the checkpoint: the served name unless there are others."""
        return _default_name(self.checkpoint, self.demo)

    @cached_property
    def processor(self) -> Any:
        """Read at its first use, which takes seconds for a published tokenizer. CheckpointError if it cannot be
        read."""
        if self.load is not None:
            return self.load()
        directory = self.checkpoint.directory
        return resolve(family_of(directory).processor)(directory)

    @property
    def chat_processor(self) -> ChatProcessor:
        return cast("ChatProcessor", self.processor)

    @property
    def speech_processor(self) -> SpeechProcessor:
        return cast(SpeechProcessor, self.processor)


class Catalog:
    """Hosted models by served name. A single model that speaks, or transcribes, also answers to OpenAI's names, unless
    a hosted model is served under them."""

    def __init__(self, hosted: Sequence[HostedModel]) -> None:
        self.models = tuple(hosted)
        self._by_name: dict[str, HostedModel] = {}
        for model in hosted:
            for name in model.names:
                if name in self._by_name:
                    raise CheckpointError(f"served_model_name: {name!r} names two models")
                self._by_name[name] = model
        speech, hearing = self.of_kind("speech"), [model for model in self.models if model.task == "transcription"]
        self._unlisted = {
            name: found[0]
            for names, found in ((OPENAI_SPEECH_NAMES, speech), (OPENAI_TRANSCRIPTION_NAMES, hearing))
            for name in names
            if len(found) == 1
        }

    def get(self, name: str) -> HostedModel | None:
        """The model of a served name, or of one of OpenAI's, also with a date as in gpt-4o-mini-tts-2025-12-15."""
        return self._by_name.get(name) or self._unlisted.get(DATE.sub("", name))

    def of_kind(self, kind: Literal["chat", "speech"]) -> list[HostedModel]:
        return [model for model in self.models if model.kind == kind]

    def of_task(self, task: Task) -> HostedModel | None:
        """The first model for a task."""
        return next((model for model in self.models if model.task == task), None)

    def load_processors(self) -> None:
        """Reads all processors that have not been read yet. CheckpointError names the file that is invalid."""
        for model in self.models:
            _ = model.processor


def load_catalog(settings: Settings, report: Callable[[str], None] = lambda line: None) -> Catalog:
    """Locates every model; processors are read at their first use. CheckpointError names the model that cannot be
    hosted."""
    sources = settings.model or embedded_models()
    aliases = _aliases(settings.served_model_name, settings.model)
    hosted = []
    for source in sources:
        report(f"{source}: locating")
        checkpoint = locate(source, load_format=settings.load_format, report=report)
        demo = not settings.model or embedded().get(source) == checkpoint.directory
        family = family_of(checkpoint.directory)
        names = aliases.get(source) or (_default_name(checkpoint, demo),)
        hosted.append(HostedModel(names, family.kind, checkpoint, None, int(time.time()), demo, family.task))
    if settings.quantization != "none" and all(model.kind == "speech" for model in hosted):
        raise CheckpointError(
            f"quantization: {settings.quantization} is for chat models, and speech models stay in 16 bits; host a chat "
            "model or leave it out"
        )
    catalog = Catalog(hosted)
    if (voice := settings.spoken_answer_model) is not None:
        model = catalog.get(voice)
        if model is None or model.kind != "speech":
            raise CheckpointError(f"spoken_answer_model: {voice!r} is not the served name of a speech model")
    return catalog


def embedded_models() -> tuple[str, ...]:
    """Directories of the checkpoints inside the package; CheckpointError when there are none."""
    if not (found := embedded()):
        raise CheckpointError(f"{EMBEDDED}: the embedded models are missing; name one with --model")
    return tuple(map(str, found.values()))


def _default_name(checkpoint: Checkpoint, demo: bool) -> str:
    if demo:
        return f"{OWNER}/{checkpoint.directory.name}"
    return checkpoint.directory.name if checkpoint.revision is None else checkpoint.source


def _aliases(served: Sequence[str], sources: Sequence[str]) -> Mapping[str, tuple[str, ...]]:
    """Aliases by model, from MODEL=ALIAS[,ALIAS]; ALIAS[,ALIAS] is for the only model."""
    aliases: dict[str, tuple[str, ...]] = {}
    for entry in served:
        source, separator, names = entry.rpartition("=")
        source = source if separator else next(iter(sources), "")
        if not sources:
            raise CheckpointError("served_model_name: needs --model; the embedded models keep their names")
        if source not in sources:
            raise CheckpointError(f"served_model_name: {source!r} is not one of the models {', '.join(sources)}")
        aliases[source] = aliases.get(source, ()) + tuple(name for name in names.split(",") if name)
    return aliases
