"""Strict loading of the published names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.checkpoints.published import read_json
from models.checkpoints.registry import family_of
from models.interfaces.errors import CheckpointError
from models.minicpmv.config import load_config
from models.minicpmv.model import MiniCPMVModel, decoder_config, load_model
from tests.models.minicpmv.golden import VERSIONS, directory, golden_prompt
from tests.support.golden import prompts

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
def test_a_tied_head_of_other_values_is_that_of_the_files(tmp_path: Path, version: str) -> None:
    """As with the other families, and in transformers 5."""
    tensors = copy(version, tmp_path)
    config = read_json(tmp_path, "config.json")
    (tmp_path / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    table = tensors["llm.model.embed_tokens.weight"]
    rows = torch.randn(2, config["hidden_size"], generator=torch.Generator().manual_seed(0))
    for head in (table.flip(0), table, None):
        changed = {name: value for name, value in tensors.items() if name != "llm.lm_head.weight"}
        if head is not None:
            changed["llm.lm_head.weight"] = head.clone()
        save_file(changed, tmp_path / "model.safetensors")
        decoder = load_model(tmp_path, CPU, torch.float32).decoder
        used = (table if head is None else head).float()
        torch.testing.assert_close(decoder.logits(rows), rows @ used.T, atol=1e-5, rtol=0)
        assert (decoder.head is None) == torch.equal(used, table.float())


def test_a_config_without_the_towers_sizes_has_those_of_the_published_one(tmp_path: Path) -> None:
    config = read_json(directory("2.5"), "config.json")
    del config["vision_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    vision = load_config(tmp_path).vision
    assert (vision.hidden_size, vision.intermediate_size, vision.num_layers, vision.table_side) == (1152, 4304, 27, 70)


@pytest.mark.parametrize("version", VERSIONS)
def test_random_weights_make_finite_embeddings(version: str) -> None:
    with torch.inference_mode():
        encoder = load_model(directory(version), CPU, torch.float32, "random").encoder
        plan = encoder.plan(golden_prompt(version, prompts(directory(version))[0]).items)
        buffers = {name: torch.from_numpy(array) for name, array in plan.arrays.items()}
        embeds = encoder.forward(buffers, plan.required)["embeds"]
    assert torch.isfinite(embeds).all()
    assert embeds.std() > 0.1


PUBLISHED_SIZES = {
    "2.5": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "vocab_size": 128256, "query_num": 96},
    "2.6": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28}
    | {"num_key_value_heads": 4, "vocab_size": 151666, "query_num": 64},
    "4.0": {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 32, "num_attention_heads": 32}
    | {"num_key_value_heads": 2, "head_dim": 128, "vocab_size": 73448, "query_num": 64, "rope_scaling": None},
    "4.5": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
    | {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151748, "query_num": 64},
}
PUBLISHED_VISION = {
    "hidden_size": 1152,
    "image_size": 980,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "patch_size": 14,
}


@pytest.mark.parametrize(("version", "total"), [("2.5", 8.537), ("2.6", 8.099), ("4.0", 4.060), ("4.5", 8.695_895_280)])
def test_published_sizes_have_the_published_number_of_parameters(tmp_path: Path, version: str, total: float) -> None:
    config = read_json(directory(version), "config.json")
    sizes = {**config, **PUBLISHED_SIZES[version], "vision_config": PUBLISHED_VISION}
    (tmp_path / "config.json").write_text(json.dumps(sizes))
    loaded = load_config(tmp_path)
    with torch.device("meta"):
        model = MiniCPMVModel(loaded, decoder_config(loaded))
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == round(total * 1e9) if version == "4.5" else round(count / 1e9, 3) == total
    assert sum(parameter.numel() for parameter in model.encoder.tower.parameters()) == 417_792_240
