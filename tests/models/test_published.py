"""Fields of published JSON files that come in several forms."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from models.checkpoints.published import stop_token_ids
from models.checkpoints.registry import family_of, resolve
from tests.support.golden import GOLDEN, copy_checkpoint, fact_of_own_fixture

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "kimi_vl", "minicpmv_2_5", "minicpmv_2_6")


@pytest.mark.parametrize(
    ("generation", "default", "expected"),
    [
        ({}, None, set()),
        ({}, 5, {5}),
        ({}, [5, 6], {5, 6}),
        ({"eos_token_id": 7}, 5, {7}),
        ({"eos_token_id": [7, 8]}, 5, {7, 8}),
        ({"eos_token_id": None}, 5, {5}),
        ({"eos_token_id": None}, None, set()),
    ],
)
def test_an_answer_ends_at_the_eos_ids_of_the_file_and_at_named_special_tokens(
    generation: dict[str, Any], default: Any, expected: set[int]
) -> None:
    assert stop_token_ids(generation, {}, (), default) == expected
    assert stop_token_ids(generation, {"<end>": 9}, ("<end>", "<other>"), default) == expected | {9}


@pytest.mark.slow
@fact_of_own_fixture
@pytest.mark.parametrize("generation", [None, {"eos_token_id": None}], ids=["no file", "null"])
@pytest.mark.parametrize("family", FAMILIES)
def test_without_other_ids_those_of_config_json_end_an_answer(
    tmp_path: Path, family: str, generation: dict[str, Any] | None
) -> None:
    directory = copy_checkpoint(GOLDEN / family, tmp_path / "checkpoint")
    (directory / "generation_config.json").unlink(missing_ok=True)
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    load = resolve(family_of(directory).processor)
    named = load(directory).stop_token_ids
    config = json.loads((directory / "config.json").read_text())
    text = config.get("text_config", config)
    for ids, expected in ((3, {3}), ([3, 4], {3, 4}), (None, set())):
        text["eos_token_id"] = ids
        (directory / "config.json").write_text(json.dumps(config))
        stops = load(directory).stop_token_ids
        assert expected <= stops <= named | expected
        assert None not in stops
