"""The model families, and how to tell which one a checkpoint belongs to. A new family is a folder beside this file and
one entry here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from models.checkpoints.published import read_config
from models.interfaces.errors import CheckpointError


@dataclass(frozen=True)
class Family:
    """A model family. Import paths are "module:function"; their modules are imported when they are needed.

    architectures: what config.json calls its models (`architectures` or `architecture`).
    processor: load_processor(directory: Path) -> ChatProcessor | SpeechProcessor. Must not import torch.
    model: load_model(directory: Path, device, dtype, load_format) -> ChatModel | SpeechModel. Strict: a missing,
        unexpected or misshapen tensor raises CheckpointError that names it. load_format "published" reads the files;
        "random" draws parameters from a fixed seed instead. Chat models take a fifth argument, quantization: "fp8"
        holds linear layers of the language model in e4m3.
    drafter: whether `model` takes the argument drafter, which loads the network of Decoder.drafter, too.
    """

    name: str
    kind: Literal["chat", "speech"]
    architectures: tuple[str, ...]
    processor: str
    model: str
    drafter: bool = False


FAMILIES: tuple[Family, ...] = (
    Family(
        "qwen2_vl",
        "chat",
        ("Qwen2VLForConditionalGeneration",),
        "models.qwen_vl.processor:load_processor",
        "models.qwen_vl.model:load_model",
    ),
    Family(
        "qwen2_5_vl",
        "chat",
        ("Qwen2_5_VLForConditionalGeneration",),
        "models.qwen_vl.v2_5.processor:load_processor",
        "models.qwen_vl.v2_5.model:load_model",
    ),
    Family(
        "qwen3_vl",
        "chat",
        ("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"),
        "models.qwen_vl.v3.processor:load_processor",
        "models.qwen_vl.v3.model:load_model",
    ),
    Family(
        "qwen3_5",
        "chat",
        ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
        "models.qwen_vl.v3_5.processor:load_processor",
        "models.qwen_vl.v3_5.model:load_model",
        drafter=True,
    ),
    Family(
        "minicpmv",
        "chat",
        ("MiniCPMV",),
        "models.minicpmv.processor:load_processor",
        "models.minicpmv.model:load_model",
    ),
    Family(
        "minicpmv4_6",
        "chat",
        ("MiniCPMV4_6ForConditionalGeneration", "MiniCPMV4_7ForConditionalGeneration"),
        "models.minicpmv.v4_6.processor:load_processor",
        "models.minicpmv.v4_6.model:load_model",
    ),
    Family(
        "kimi_vl",
        "chat",
        ("KimiVLForConditionalGeneration",),
        "models.kimi_vl.processor:load_processor",
        "models.kimi_vl.model:load_model",
    ),
    Family(
        "voxcpm2",
        "speech",
        ("voxcpm2",),
        "models.voxcpm2.processor:load_processor",
        "models.voxcpm2.model:load_model",
    ),
)


def family_of(directory: Path) -> Family:
    """The family of the checkpoint in `directory`. CheckpointError says why it cannot be hosted: it is an adapter, or
    quantised in an unsupported format, or of another architecture."""
    config = read_config(directory)
    architectures = [*(config.get("architectures") or ()), *filter(None, [config.get("architecture")])]
    for family in FAMILIES:
        if set(architectures) & set(family.architectures):
            return family
    known = sorted(name for family in FAMILIES for name in family.architectures)
    raise CheckpointError(f"{directory}: config.json: architecture {architectures} is not hosted; hosted are {known}")


def resolve(path: str) -> Callable[..., Any]:
    """The function at import path "module:function"."""
    module, _, name = path.partition(":")
    return getattr(import_module(module), name)
