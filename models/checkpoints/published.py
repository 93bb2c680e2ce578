"""The JSON files of a published checkpoint. Torch-free."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from models.checkpoints.published_fields import check_fields
from models.checkpoints.quantization_config import quantization_of
from models.interfaces.errors import CheckpointError
from models.layers.rope_field import rope_field

Section = TypeVar("Section")


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """The object in file `name`. CheckpointError if the file is missing or holds no JSON object, or if the value of a
    field is of the wrong kind (models/checkpoints/published_fields.py)."""
    try:
        value = json.loads((directory / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory}: {name} cannot be read: {error}") from error
    except RecursionError as error:
        raise CheckpointError(f"{directory}: {name} cannot be read: it is nested too deeply") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{directory}: {name} must hold an object, not {type(value).__name__}")
    check_fields(directory, name, value)
    return value


def check_heads(width: int, heads: int, named: tuple[str, str], section: str = "vision_config") -> None:
    """Raises CheckpointError if `heads` attention heads of a tower do not divide its `width`, which no tensor's shape
    would tell. named: the fields of `section` that hold the two."""
    if width % heads:
        raise CheckpointError(f"config.json: {section}: {named[0]} {width} is no multiple of {named[1]} {heads}")


def read_optional_json(directory: Path, name: str) -> dict[str, Any]:
    """Like read_json, and {} when there is no such file."""
    return read_json(directory, name) if (directory / name).exists() else {}


def preprocessor_fields(directory: Path, section: str, file: str) -> tuple[str, dict[str, Any]]:
    """The fields of a preprocessor, after the name of their place for error messages.

    They are in `section` of processor_config.json, which transformers 5 writes instead of `file` and prefers to it, or
    else in `file`. {} if there is neither.
    """
    settings: dict[str, Any] | None = read_optional_json(directory, "processor_config.json").get(section)
    if settings is not None:
        return f"processor_config.json: {section}", settings
    return file, read_optional_json(directory, file)


def section_of(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A copy of an object inside a config.json; CheckpointError if it is missing or null."""
    section = config.get(name)
    if section is None:
        raise CheckpointError(f"config.json: {name} is missing, expected an object")
    return dict(section)


def require_fields(
    where: str, values: Mapping[str, Any], expected: Mapping[str, Any], *, needed: bool = False, said: str = "expected"
) -> None:
    """Raises CheckpointError for the first field with another value than the expected one, which would need another
    network or other steps. where: the place of the fields, up to their names. needed: an absent field is refused, too;
    else it has the expected value. said: what the error calls that value."""
    for name, value in expected.items():
        if (found := values.get(name, None if needed else value)) != value:
            raise CheckpointError(f"{where}{name} is {found!r}, {said} {value!r}")


def section_as(kind: type[Section], values: Mapping[str, Any], where: str) -> Section:
    """An instance of the dataclass `kind`, whose fields have the published names. CheckpointError lists those that are
    missing or null. where: the section's place."""
    found = {name: value for name, value in values.items() if value is not None}
    missing = [field.name for field in fields(kind) if field.name not in found and field.default is MISSING]  # type: ignore[arg-type]
    if missing:
        raise CheckpointError(f"{where} lacks {', '.join(missing)}")
    try:
        return msgspec.convert(found, kind)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"{where}: {error}") from error


def of_channels(values: Mapping[str, Any], name: str, where: str, channels: int = 3) -> tuple[float, ...]:
    """A preprocessor's field with a number for each channel; CheckpointError if there are not as many, KeyError without
    the field."""
    numbers = values[name]
    if numbers is None or len(numbers) != channels:
        raise CheckpointError(f"{where}: {name} is {numbers!r}, expected {channels} numbers")
    return tuple(numbers)


def token_id(config: Mapping[str, Any], name: str) -> int:
    """A field of a config.json that holds the id of a token; KeyError if it is missing or null."""
    value = config.get(name)
    if value is None:
        raise KeyError(name)
    return int(value)


_TEXT_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("rms_norm_eps", "rope_theta", "max_position_embeddings"),
)


def require_text_fields(directory: Path, text: Mapping[str, Any]) -> None:
    """Raises CheckpointError that names the fields of a language model's configuration that are missing or null. Each
    process that reads the file needs only some of them, but checks all, so that every one reports the same error."""
    _, rope = rope_field(text)
    values = {**text, "rope_theta": rope.get("rope_theta") or text.get("rope_theta")}
    if missing := [name for name in _TEXT_FIELDS if values.get(name) is None]:
        raise CheckpointError(f"{directory}: config.json: fields of the language model are missing: {missing}")


SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def sampling_defaults(
    generation: Mapping[str, Any], recommended: Mapping[str, float | int] | None = None
) -> dict[str, float | int]:
    """Sampling fields of a generation_config.json; "do_sample": false means greedy decoding. recommended: what
    the model's makers recommend elsewhere, which is used if the file has none of these fields.
    """
    defaults = {name: generation[name] for name in SAMPLING_FIELDS if generation.get(name) is not None}
    if generation.get("do_sample") is False:
        return {**defaults, "temperature": 0.0}
    return defaults or dict(recommended or {})


def stop_token_ids(
    generation: Mapping[str, Any],
    special_ids: Mapping[str, int],
    names: Iterable[str],
    default: int | list[int] | None = None,
) -> frozenset[int]:
    """Ids that end an answer: eos_token_id of a generation_config.json, or `default` if it is missing or null; and
    those of the special tokens `names` that the tokenizer has, because published lists leave out the end of a turn."""
    eos = generation.get("eos_token_id")
    named = [special_ids[name] for name in names if name in special_ids]
    return frozenset([*id_list(default if eos is None else eos), *named])


def id_list(ids: int | list[int] | None) -> list[int]:
    """The ids of a field that holds one, several or none."""
    if ids is None:
        return []
    return ids if isinstance(ids, list) else [ids]


def read_config(directory: Path) -> dict[str, Any]:
    """config.json of a checkpoint. Raises CheckpointError for adapters, which often have none, and for quantised
    checkpoints in formats that are not hosted (models/checkpoints/quantization_config.py)."""
    if (directory / "adapter_config.json").exists():
        raise CheckpointError(f"{directory}: adapter_config.json: adapter checkpoints are not hosted")
    if not (directory / "config.json").exists():
        gguf = sorted(directory.glob("*.gguf"))
        found = f": {gguf[0].name}: GGUF checkpoints are not hosted" if gguf else ""
        raise CheckpointError(f"{directory}: no readable config.json{found}")
    config = read_json(directory, "config.json")
    try:
        quantization_of(config)
    except CheckpointError as error:
        raise CheckpointError(f"{directory}: config.json: {error}") from error
    return config
