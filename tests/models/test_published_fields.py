"""Values of a wrong kind in a checkpoint's JSON files: it loads, or one line names the file and the field."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from models.checkpoints.registry import family_of, resolve
from models.interfaces.errors import CheckpointError
from models.text import tokenizer
from tests.support.golden import GOLDEN, OWN, copy_checkpoint

DIRECTORIES = sorted(path.parent.name for path in OWN.glob("*/config.json"))
FILES = (
    *("config.json", "preprocessor_config.json", "video_preprocessor_config.json", "processor_config.json"),
    "generation_config.json",
)
ABSENT = object()
WRONG: tuple[Any, ...] = ("many", None, [], ["many"], {"many": 1}, True, -1, 0, 1.5, float("nan"), ABSENT)
OTHERWISE_NAMED = re.compile(
    r"architecture \[.*\] is not hosted|rope_scaling type .* is not supported|embeddings have 3584 values"
    r"|field '\w+' is missing|fields of .* are missing: \["
)
"""What some messages say in place of the field: a part of it that is missing, or a value."""


def places(fields: dict[str, Any], outer: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, value in fields.items():
        yield (*outer, name)
        if isinstance(value, dict):
            yield from places(value, (*outer, name))


def mutants(content: str, step: int) -> Iterator[tuple[str, Any, str]]:
    """Name of a field, what it holds, and the file. step: each field gets every so many of the wrong values."""
    for number, place in enumerate(places(json.loads(content))):
        for wrong in [wrong for index, wrong in enumerate(WRONG) if (number + index) % step == 0]:
            changed = json.loads(content)
            section = changed
            for name in place[:-1]:
                section = section[name]
            if wrong is ABSENT:
                del section[place[-1]]
            else:
                section[place[-1]] = wrong
            yield place[-1], wrong, json.dumps(changed)


@pytest.fixture(autouse=True)
def tokenizer_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    make, kept = tokenizer.Tokenizer, list[Any]()

    def make_once(*args: Any, **options: Any) -> Any:
        if not kept:
            kept.append(make(*args, **options))
        return kept[0]

    monkeypatch.setattr(tokenizer, "Tokenizer", make_once)


def load(directory: Path) -> None:
    """As the processes that serve it read it: the processor, and the model with its shapes alone."""
    family = family_of(directory)
    processor = resolve(family.processor)(directory)
    if family.kind == "chat":
        assert all(type(token) is int for token in processor.stop_token_ids)
        assert all(type(value) in (int, float) for value in processor.generation_defaults.values())
    resolve(family.model)(directory, torch.device("meta"), torch.bfloat16, "random")


@pytest.mark.parametrize("step", [67, pytest.param(3, marks=pytest.mark.slow)], ids=["some", "many"])
@pytest.mark.parametrize("name", DIRECTORIES)
def test_a_field_of_a_wrong_kind_is_named(tmp_path: Path, name: str, step: int) -> None:
    directory = copy_checkpoint(GOLDEN / name, tmp_path / name)
    load(directory)
    unclear: list[str] = []
    for file in FILES:
        path = directory / file
        if not path.exists():
            continue
        content = path.read_text()
        for field, wrong, changed in mutants(content, step):
            path.write_text(changed)
            what = f"{file}: {field} = {wrong!r}"
            try:
                load(directory)
            except CheckpointError as error:
                message = str(error)
                named = file in message and (field in message or OTHERWISE_NAMED.search(message))
                if not named or "\n" in message:
                    unclear.append(f"{what}: {message}")
            except Exception as error:
                unclear.append(f"{what}: {error!r}")
        path.write_text(content)
    assert not unclear, "\n".join(unclear)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_null_ids_of_transformers_4(tmp_path: Path, name: str) -> None:
    """Releases 4.52 to 4.57 wrote them into text_config, where nobody reads them; outside they are missing."""
    path = copy_checkpoint(GOLDEN / name, tmp_path / name) / "config.json"
    published = json.loads(path.read_text())
    ids = {"image_token_id": None, "video_token_id": None}
    path.write_text(json.dumps({**published, "text_config": {**published, **ids}}))
    load(path.parent)
    path.write_text(json.dumps({**published, "image_token_id": None}))
    with pytest.raises(CheckpointError, match=r"config\.json: field 'image_token_id' is missing"):
        load(path.parent)
