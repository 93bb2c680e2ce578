"""The model families, and how to tell which one a checkpoint belongs to. A new family is a folder in `models` and one
entry here."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from models.checkpoints.published import read_config
from models.interfaces.errors import CheckpointError


@dataclass(frozen=True)
class Family:
    """A model family. architectures: what config.json calls its models (`architectures` or `architecture`). package:
    has the modules that `processor` and `model` name, as import paths for `resolve`. drafter: whether `model` takes the
    argument drafter, which loads the network of Decoder.drafter, too. task: what requests ask of it, if it is not
    `kind`. processor_at: the module with load_processor, if it is not the package's `processor`."""

    name: str
    kind: Literal["chat", "speech"]
    architectures: tuple[str, ...]
    package: str
    drafter: bool = False
    task: Literal["transcription", "alignment"] | None = None
    processor_at: str = ""

    @property
    def processor(self) -> str:
        """load_processor(directory: Path) -> ChatProcessor | SpeechProcessor. Must not import torch."""
        return f"{self.processor_at or f'{self.package}.processor'}:load_processor"

    @property
    def model(self) -> str:
        """load_model(directory: Path, device, dtype, load_format) -> ChatModel | SpeechModel. Strict: a missing,
        unexpected or misshapen tensor raises CheckpointError that names it. load_format "published" reads the files;
        "random" draws parameters from a fixed seed instead. Chat models take a fifth argument, quantization: "fp8"
        holds linear layers of the language model in e4m3."""
        return f"{self.package}.model:load_model"


_NAMED = "ForConditionalGeneration"
ALIGNERS = ("Qwen3ASRForTokenClassification", "qwen3_forced_aligner")
"""The second is thinker_config.model_type: the makers' file names the recogniser's architecture."""
_QWEN3_5 = (f"Qwen3_5{_NAMED}", f"Qwen3_5Moe{_NAMED}")
FAMILIES: tuple[Family, ...] = (
    Family("qwen2_vl", "chat", (f"Qwen2VL{_NAMED}",), "models.qwen_vl"),
    Family("qwen2_5_vl", "chat", (f"Qwen2_5_VL{_NAMED}",), "models.qwen_vl"),
    Family("qwen3_vl", "chat", (f"Qwen3VL{_NAMED}", f"Qwen3VLMoe{_NAMED}"), "models.qwen_vl.v3"),
    Family(
        "qwen3_5", "chat", _QWEN3_5, "models.qwen_vl.v3_5", drafter=True, processor_at="models.qwen_vl.v3.processor"
    ),
    Family("minicpmv", "chat", ("MiniCPMV",), "models.minicpmv"),
    Family("minicpmv4_6", "chat", (f"MiniCPMV4_6{_NAMED}", f"MiniCPMV4_7{_NAMED}"), "models.minicpmv.v4_6"),
    Family("kimi_vl", "chat", (f"KimiVL{_NAMED}",), "models.kimi_vl"),
    Family(
        "qwen3_aligner", "chat", ALIGNERS, "models.qwen3_asr", task="alignment", processor_at="models.qwen3_asr.aligner"
    ),
    Family("qwen3_asr", "chat", (f"Qwen3ASR{_NAMED}",), "models.qwen3_asr", task="transcription"),
    Family("voxcpm2", "speech", ("voxcpm2",), "models.voxcpm2"),
)


def family_of(directory: Path) -> Family:
    """The family of the checkpoint in `directory`. CheckpointError says why it cannot be hosted: it is an adapter, or
    quantised in an unsupported format, or of another architecture."""
    config = read_config(directory)
    inner = (config.get("thinker_config") or {}).get("model_type")
    architectures = [*(config.get("architectures") or ()), *filter(None, [config.get("architecture"), inner])]
    for family in FAMILIES:
        if set(architectures) & set(family.architectures):
            return family
    known = sorted(name for family in FAMILIES for name in family.architectures)
    raise CheckpointError(f"{directory}: config.json: architecture {architectures} is not hosted; hosted are {known}")


resolve: Callable[[str], Callable[..., Any]] = pkgutil.resolve_name
"""The function at import path "module:function"."""
