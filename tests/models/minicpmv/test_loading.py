"""Strict loading of the published names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.errors import CheckpointError
from models.minicpmv.model import load_model
from models.published import read_json
from models.registry import family_of
from tests.models.minicpmv.golden import VERSIONS, directory, golden_prompt

CPU = torch.device("cpu")


def copy(version: str, target: Path) -> dict[str, torch.Tensor]:
    shutil.copytree(
        directory(version), target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("expected*", "images")
    )
    return load_file(target / "model.safetensors")


@pytest.mark.parametrize("version", VERSIONS)
def test_family(version: str) -> None:
    assert family_of(directory(version)).name == "minicpmv"


def test_missing_unexpected_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    tensors = copy("4.5", tmp_path)
    for name, change in {
        "vpm.encoder.layers.1.self_attn.k_proj.bias": None,
        "resampler.attn.in_proj_weight": None,
        "llm.model.layers.0.self_attn.q_norm.weight": torch.zeros(3),
        "apm.conv1.weight": torch.zeros(3),
    }.items():
        changed = {**tensors, name: change} if change is not None else {k: v for k, v in tensors.items() if k != name}
        save_file(changed, tmp_path / "model.safetensors")
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
            load_model(tmp_path, CPU, torch.float32)


@pytest.mark.parametrize("keep", [True, False])
def test_dropped_last_vision_layer(tmp_path: Path, keep: bool) -> None:
    """drop_vision_last_layer ignores the last layer's tensors, whether they are there or not."""
    tensors = copy("2.6", tmp_path)
    config = read_json(tmp_path, "config.json")
    last = config["vision_config"]["num_hidden_layers"] - 1
    if not keep:
        tensors = {k: v for k, v in tensors.items() if not k.startswith(f"vpm.encoder.layers.{last}.")}
        save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({**config, "drop_vision_last_layer": True}))
    assert len(load_model(tmp_path, CPU, torch.float32).encoder.tower.layers) == last


@pytest.mark.parametrize("version", VERSIONS)
def test_random_weights_make_finite_embeddings(version: str) -> None:
    with torch.inference_mode():
        encoder = load_model(directory(version), CPU, torch.float32, "random").encoder
        plan = encoder.plan(golden_prompt(version, "images").items)
        buffers = {name: torch.from_numpy(array) for name, array in plan.arrays.items()}
        embeds = encoder.forward(buffers, plan.needs)["embeds"]
    assert torch.isfinite(embeds).all()
    assert embeds.std() > 0.1
