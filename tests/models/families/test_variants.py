"""Configurations that the golden ones are not, with random weights against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from models.qwen_vl.encoder import patch_rows
from tests.models.families.family import FAMILIES
from tests.support.chat_golden import generate
from tests.support.golden import change_json, copy_checkpoint, fact_of_own_fixture
from tests.support.prompts import prompt_of, say

pytestmark = [fact_of_own_fixture, pytest.mark.slow]

YARN = {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 64}
"""As the publisher recommends it for prompts beyond the trained length."""


def without_weights(name: str, target: Path) -> Path:
    """A copy of a golden checkpoint without its tensors."""
    directory = copy_checkpoint(FAMILIES[name].directory, target)
    for path in directory.glob("*.safetensors*"):
        path.unlink()
    return directory


def variant_of(name: str, target: Path, text: dict[str, Any], rope: dict[str, Any] | None = None) -> Path:
    """The golden checkpoint's files without weights, with other fields of the language model and its rope_scaling."""
    directory = without_weights(name, target)
    config = json.loads((directory / "config.json").read_text())
    section = config.get("text_config", config)
    section |= text
    section["rope_scaling"] |= rope or {}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@torch.no_grad()
def save_random(directory: Path) -> torch.nn.Module:
    """The published code's model of these files, with random weights that it saves beside them."""
    import transformers

    published = (directory / "config.json").read_text()
    (name,) = json.loads(published)["architectures"]
    torch.manual_seed(0)
    model = getattr(transformers, name)(transformers.AutoConfig.from_pretrained(directory)).float().eval()
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.normal_(1.0, 0.2)
        else:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    model.tie_weights()
    model.save_pretrained(directory)
    (directory / "config.json").write_text(published)
    return model


@torch.inference_mode()
def check_like_reference(name: str, directory: Path) -> None:
    """Logits of a prompt with two pictures, by the model of transformers that saved the weights and by ours."""
    family = FAMILIES[name]
    reference, processor = save_random(directory), family.processor_of(directory)
    settings = json.loads((directory / "preprocessor_config.json").read_text())
    factor = settings["patch_size"] * settings["merge_size"]
    pixels = torch.randint(256, (5 * factor, 3 * factor, 3), dtype=torch.uint8).numpy()
    items = [processor.image(Image.fromarray(part)) for part in (pixels, pixels[: 2 * factor])]
    prompt = prompt_of(processor, [say("user", 0, "or", 1)], items)
    model = family.loaded(directory)
    ids, encoder = torch.from_numpy(prompt.token_ids).long()[None], model.encoder
    expected = reference(
        input_ids=ids,
        pixel_values=torch.cat(
            [encoder.normalise(patch_rows(item, encoder.config, torch.device("cpu"))) for item in items]
        ),
        image_grid_thw=torch.stack([torch.from_numpy(item.arrays["grid_thw"]).long() for item in items]),
        mm_token_type_ids=(ids == processor.config.image_token_id).long(),
    ).logits[0]
    torch.testing.assert_close(generate(model, prompt, 1)[0], expected, atol=3e-5, rtol=0)


@pytest.mark.parametrize(("patch", "merge", "temporal", "divisor"), [(14, 3, 1, 4), (7, 1, 1, 1)])
def test_embedding_rows_of_any_number_of_bytes(
    tmp_path: Path, patch: int, merge: int, temporal: int, divisor: int
) -> None:
    """Those of the published sizes are moved eight bytes at a time."""
    bytes_of_a_row = 3 * temporal * patch**2 * merge**2
    assert bytes_of_a_row % divisor == 0 and (divisor == 8 or bytes_of_a_row % (2 * divisor))
    directory = without_weights("qwen2_5_vl", tmp_path / "variant")
    vision = json.loads((directory / "config.json").read_text())["vision_config"]
    vision |= {"patch_size": patch, "spatial_merge_size": merge, "temporal_patch_size": temporal}
    vision["window_size"] = 2 * patch * merge
    change_json(directory / "config.json", {"vision_config": vision})
    sizes = {"patch_size": patch, "merge_size": merge, "temporal_patch_size": temporal}
    limits = {"min_pixels": (patch * merge) ** 2, "max_pixels": 24 * (patch * merge) ** 2}
    change_json(directory / "preprocessor_config.json", sizes | limits)
    check_like_reference("qwen2_5_vl", directory)


@pytest.mark.parametrize(
    ("name", "text", "rope"),
    [
        # As the smallest checkpoints have them: turns that do not fit do not happen, what is left is time's.
        ("qwen3_vl", {}, {"mrope_section": [16, 8, 8]}),
        ("qwen3_vl", {"rope_theta": 1e4}, {"rope_theta": 3e5}),
        ("qwen3_vl", {}, YARN),
        ("qwen2_5_vl", {}, YARN | {"type": "yarn"}),
        # Features of more levels than layers have no use.
        ("qwen3_vl", {"num_hidden_layers": 2}, {}),
    ],
)
def test_other_fields_of_the_language_model(
    tmp_path: Path, name: str, text: dict[str, Any], rope: dict[str, Any]
) -> None:
    check_like_reference(name, variant_of(name, tmp_path / "variant", text, rope))


@pytest.mark.parametrize(
    ("text", "dense"),
    [
        ({"mlp_only_layers": [1], "num_hidden_layers": 3}, {1}),
        ({"decoder_sparse_step": 2, "num_hidden_layers": 4}, {0, 2}),
        ({"mlp_only_layers": None, "num_hidden_layers": 2}, set()),
    ],
)
def test_dense_layers_between_sparse_ones(tmp_path: Path, text: dict[str, Any], dense: set[int]) -> None:
    directory = variant_of("qwen3_vl_moe", tmp_path / "variant", text)
    check_like_reference("qwen3_vl_moe", directory)
    assert FAMILIES["qwen3_vl_moe"].processor_of(directory).config.experts.dense_layers == dense


@pytest.mark.parametrize("share", [1, 2], ids=["down", "gate and up"])
def test_square_matrices_of_experts_load_in_both_orders(tmp_path: Path, share: int) -> None:
    """Only the shape of the other matrix tells published files from those that transformers 5 saves."""
    family = FAMILIES["qwen3_vl_moe"]
    inner = family.model.decoder.hidden_size // share
    directory = variant_of(family.name, tmp_path / "saved", {"moe_intermediate_size": inner})
    check_like_reference(family.name, directory)
    saved = family.loaded(directory)
    tensors = load_file(directory / "model.safetensors")
    stacked = [name for name in tensors if ".experts." in name]
    assert any(tensors[name].shape[1] == tensors[name].shape[2] for name in stacked)
    exchanged = {name: tensors[name].mT.contiguous() for name in stacked}
    save_file({**tensors, **exchanged}, directory / "model.safetensors")
    assert all(map(torch.equal, saved.parameters(), family.loaded(directory).parameters()))
