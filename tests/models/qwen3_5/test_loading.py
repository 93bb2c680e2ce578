"""Checkpoints of Qwen3.5 in other forms than the fixtures', and configurations that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.interfaces.errors import CheckpointError
from models.qwen_vl.v3_5.config import load_config
from models.qwen_vl.v3_5.model import load_model
from tests.models.families.family import FAMILIES
from tests.support.block_fp8 import FP8, quantised
from tests.support.golden import copy_checkpoint
from tests.support.inference import no_gradients as no_gradients

DENSE, MIXTURE = FAMILIES["qwen3_5"], FAMILIES["qwen3_5_moe"]
NOT_IN_FP8 = ("in_proj_a", "in_proj_b", "conv1d", "mlp.gate.", "shared_expert_gate", "norm", "A_log", "dt_bias")


def tensors_of(directory: Path) -> dict[str, Tensor]:
    files = directory.glob("model*.safetensors")
    return {name: value for path in files for name, value in load_file(path).items()}


def rewritten(directory: Path, tensors: dict[str, Tensor], **config: Any) -> Path:
    """The directory with these tensors in one file and these fields in config.json."""
    for path in directory.glob("model*"):
        path.unlink()
    save_file(tensors, directory / "model.safetensors")
    fields = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(fields | config))
    return directory


def apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each expert's matrices in tensors of their own."""
    split: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if "experts.gate_up_proj" in name:
            for expert, both in enumerate(value):
                for part, rows in zip(("gate", "up"), both.chunk(2), strict=True):
                    prefix = name.replace("gate_up_proj", str(expert))
                    split[f"{prefix}.{part}_proj.weight"] = rows.contiguous()
        elif "experts.down_proj" in name:
            for expert, rows in enumerate(value):
                split[f"{name.replace('down_proj', str(expert))}.down_proj.weight"] = rows.contiguous()
        else:
            split[name] = value
    return split


def test_block_scaled_fp8_with_experts_apart_is_dequantised(tmp_path: Path) -> None:
    """The drafter's weights are in FP8, too."""
    layers = ("model.language_model.layers.", "mtp.layers.")

    def chosen(name: str) -> bool:
        return name.startswith(layers) and not any(part in name for part in NOT_IN_FP8)

    stored, meant = quantised(apart(tensors_of(MIXTURE.directory)), chosen)
    fp8 = rewritten(copy_checkpoint(MIXTURE.directory, tmp_path / "fp8"), stored, quantization_config=FP8)
    plain = rewritten(copy_checkpoint(MIXTURE.directory, tmp_path / "plain"), meant)
    loaded, expected = (MIXTURE.loaded(directory).state_dict() for directory in (fp8, plain))
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in loaded.items())


def test_experts_apart_are_those_in_one_tensor(tmp_path: Path) -> None:
    directory = rewritten(copy_checkpoint(MIXTURE.directory, tmp_path / "apart"), apart(tensors_of(MIXTURE.directory)))
    loaded, expected = (
        load_model(path, "cpu", torch.float32, drafter=True).state_dict() for path in (directory, MIXTURE.directory)
    )
    assert all(torch.equal(value, expected[name]) for name, value in loaded.items())


def test_small_parameters_keep_their_digits() -> None:
    """A_log and the gated norms are float32 in the file; norms of rows become 1 + w in float32."""
    stored, layer = tensors_of(DENSE.directory), DENSE.fresh("cpu", torch.bfloat16).decoder.layers[0]
    prefix = "model.language_model.layers.0."
    assert torch.equal(layer.delta.A_log, stored[f"{prefix}linear_attn.A_log"])
    assert torch.equal(layer.delta.norm, stored[f"{prefix}linear_attn.norm.weight"])
    assert torch.equal(layer.attention_norm.weight, 1 + stored[f"{prefix}input_layernorm.weight"].float())


def test_the_drafter_may_be_left_out_but_has_no_unknown_tensors(tmp_path: Path) -> None:
    tensors = tensors_of(DENSE.directory)
    directory = copy_checkpoint(DENSE.directory, tmp_path / "copy")
    rewritten(directory, {name: value for name, value in tensors.items() if not name.startswith("mtp.")})
    assert load_model(directory, "cpu", torch.float32, drafter=True).decoder.drafter is None
    rewritten(directory, tensors | {"mtp.other.weight": torch.zeros(2)})
    with pytest.raises(CheckpointError, match=r"unexpected tensors: .*mtp\.other\.weight"):
        DENSE.loaded(directory)


def test_the_interval_decides_without_a_list_of_layers(tmp_path: Path) -> None:
    directory = copy_checkpoint(DENSE.directory, tmp_path / "interval")
    published = json.loads((directory / "config.json").read_text())
    del published["text_config"]["layer_types"], published["vision_config"]["deepstack_visual_indexes"]
    (directory / "config.json").write_text(json.dumps(published))
    assert load_config(directory).text["layer_types"] == load_config(DENSE.directory).text["layer_types"]
