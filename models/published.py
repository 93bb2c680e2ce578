"""The JSON files of a published checkpoint, read where no GPU library is loaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.errors import CheckpointError


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """The object in file `name`; CheckpointError when it is missing or no JSON object."""
    try:
        value = json.loads((directory / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory}: {name} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{directory}: {name} must hold an object, not {type(value).__name__}")
    return value


def read_optional_json(directory: Path, name: str) -> dict[str, Any]:
    """Like read_json, and {} when there is no such file."""
    return read_json(directory, name) if (directory / name).exists() else {}


SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(generation: Mapping[str, Any]) -> dict[str, float | int]:
    """Sampling fields of a generation_config.json; one that says "do_sample": false asks for greedy decoding."""
    defaults = {name: generation[name] for name in SAMPLING_FIELDS if generation.get(name) is not None}
    return {**defaults, "temperature": 0.0} if generation.get("do_sample") is False else defaults


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a full-precision checkpoint. Adapters, which often have none, and quantised checkpoints are
    refused by name."""
    if (directory / "adapter_config.json").exists():
        raise CheckpointError(f"{directory}: adapter_config.json: adapter checkpoints are not hosted")
    if not (directory / "config.json").exists():
        gguf = sorted(directory.glob("*.gguf"))
        found = f": {gguf[0].name}: GGUF checkpoints are not hosted" if gguf else ""
        raise CheckpointError(f"{directory}: no readable config.json{found}")
    config = read_json(directory, "config.json")
    sections = {"": config, **{f"{key}.": value for key, value in config.items() if isinstance(value, dict)}}
    for prefix, section in sections.items():
        quantization = section.get("quantization_config") or section.get("compression_config")
        if quantization:
            method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else quantization
            raise CheckpointError(
                f"{directory}: {prefix}quantization_config ({method}): quantised checkpoints are not hosted"
            )
    return config
