"""Configurations that the published ones are not, with random weights against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.interfaces.errors import CheckpointError
from models.interfaces.media import ChatMessage, ContentPart, Prompt
from models.qwen3_vl.model import load_model
from models.qwen3_vl.processor import load_processor
from tests.models.qwen3_vl.golden import CPU, DENSE, MIXTURE, Golden
from tests.support.golden import fact_of_own_fixture
from tests.support.prompts import prompt_of
from tests.support.random_reference import check_pictures, save_random, without_weights

pytestmark = fact_of_own_fixture


def variant_of(golden: Golden, target: Path, text: dict[str, Any], rope: dict[str, Any] | None = None) -> Path:
    """The golden checkpoint's files without weights, with other fields in text_config and in its rope_scaling."""
    directory = without_weights(golden.directory, target)
    config = json.loads((directory / "config.json").read_text())
    config["text_config"] |= text
    config["text_config"]["rope_scaling"] |= rope or {}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def two_pictures(golden: Golden) -> Prompt:
    items = [golden.item(name) for name in golden.images[:2]]
    parts = (ContentPart(item=0), ContentPart(text="or"), ContentPart(item=1))
    return prompt_of(golden.processor, [ChatMessage("user", parts)], items)


def check_like_reference(golden: Golden, directory: Path) -> None:
    reference, model = save_random(directory), load_model(directory, CPU, torch.float32)
    check_pictures(reference, model, two_pictures(golden), golden.processor.config.image_token_id)


@pytest.mark.parametrize("sections", [[16, 8, 8], [4, 4, 4], [6, 5, 4]])
def test_interleaved_sections_that_are_not_half_a_head(tmp_path: Path, sections: list[int]) -> None:
    """As the smallest checkpoints have them: turns that do not fit do not happen, what is left is time's."""
    assert sum(sections) != DENSE.model.decoder.config.block.head_dim // 2
    check_like_reference(DENSE, variant_of(DENSE, tmp_path / "variant", {}, {"mrope_section": sections}))


def test_rope_theta_inside_the_field_of_rotary_positions_counts(tmp_path: Path) -> None:
    check_like_reference(DENSE, variant_of(DENSE, tmp_path / "variant", {"rope_theta": 1e4}, {"rope_theta": 3e5}))


def test_yarn_beside_three_axes(tmp_path: Path) -> None:
    """As the publisher recommends it for prompts beyond the trained length."""
    yarn = {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 64}
    check_like_reference(DENSE, variant_of(DENSE, tmp_path / "variant", {}, yarn))


def test_features_of_more_levels_than_layers_have_no_use(tmp_path: Path) -> None:
    assert DENSE.model.decoder.feature_levels > 2
    check_like_reference(DENSE, variant_of(DENSE, tmp_path / "variant", {"num_hidden_layers": 2}))


@pytest.mark.parametrize(
    ("text", "dense"),
    [
        ({"mlp_only_layers": [1], "num_hidden_layers": 3}, {1}),
        ({"decoder_sparse_step": 2, "num_hidden_layers": 4}, {0, 2}),
        ({"mlp_only_layers": None, "num_hidden_layers": 2}, set()),
    ],
)
def test_dense_layers_between_sparse_ones(tmp_path: Path, text: dict[str, Any], dense: set[int]) -> None:
    directory = variant_of(MIXTURE, tmp_path / "variant", text)
    check_like_reference(MIXTURE, directory)
    assert load_processor(directory).config.experts.dense_layers == dense  # type: ignore[union-attr]


def test_a_mixture_without_a_sparse_layer_is_refused(tmp_path: Path) -> None:
    directory = variant_of(MIXTURE, tmp_path / "variant", {"mlp_only_layers": [0, 1], "num_hidden_layers": 2})
    with pytest.raises(CheckpointError, match="mlp_only_layers leaves no layer with experts"):
        load_processor(directory)


@pytest.mark.parametrize("share", [1, 2], ids=["down", "gate and up"])
def test_square_matrices_of_experts_load_in_both_orders(tmp_path: Path, share: int) -> None:
    """Only the shape of the other matrix tells published files from those that transformers 5 saves."""
    inner = MIXTURE.model.decoder.hidden_size // share
    directory = variant_of(MIXTURE, tmp_path / "saved", {"moe_intermediate_size": inner})
    check_like_reference(MIXTURE, directory)
    saved = load_model(directory, CPU, torch.float32)
    tensors = load_file(directory / "model.safetensors")
    stacked = [name for name in tensors if ".experts." in name]
    assert any(tensors[name].shape[1] == tensors[name].shape[2] for name in stacked)
    exchanged = {name: tensors[name].mT.contiguous() for name in stacked}
    save_file({**tensors, **exchanged}, directory / "model.safetensors")
    published = load_model(directory, CPU, torch.float32)
    assert all(map(torch.equal, saved.parameters(), published.parameters()))
