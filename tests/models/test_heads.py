"""Numbers of heads that no tensor's shape contradicts: a checkpoint would load and answer wrongly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from models.checkpoints.registry import family_of, resolve
from models.interfaces.errors import CheckpointError
from tests.support.golden import GOLDEN, copy_checkpoint


def changed(config: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    return config | {
        name: changed(config[name], value) if isinstance(value, dict) else value for name, value in changes.items()
    }


TOWER = r"vision_config: .*hidden_size \d+ is no multiple of num\w*heads 7"


@pytest.mark.parametrize(
    ("family", "changes", "problem"),
    [
        ("qwen2_vl", {"vision_config": {"num_heads": 7}}, TOWER),
        ("qwen3_vl", {"vision_config": {"num_heads": 7}}, TOWER),
        ("kimi_vl", {"vision_config": {"num_attention_heads": 7}}, TOWER),
        ("minicpmv_4_5", {"vision_config": {"num_attention_heads": 7}}, TOWER),
        ("minicpmv_2_6", {"num_key_value_heads": 3}, r"num_attention_heads \d+ is not a multiple of .* 3"),
    ],
)
def test_heads_that_do_not_fit_are_refused(tmp_path: Path, family: str, changes: dict[str, Any], problem: str) -> None:
    directory = copy_checkpoint(GOLDEN / family, tmp_path / family)
    path = directory / "config.json"
    path.write_text(json.dumps(changed(json.loads(path.read_text()), changes)))
    with pytest.raises(CheckpointError, match=problem):
        resolve(family_of(directory).model)(directory, torch.device("cpu"), torch.float32, "random")
