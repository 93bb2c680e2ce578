"""Configurations that the golden ones are not, with random weights against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from models.qwen_vl.encoder import patch_rows
from tests.models.families.family import FAMILIES
from tests.support.chat_golden import generate
from tests.support.golden import copy_checkpoint, fact_of_own_fixture
from tests.support.prompts import prompt_of, say

pytestmark = [fact_of_own_fixture, pytest.mark.slow]

YARN = {"rope_type": "yarn", "factor": 3.0, "original_max_position_embeddings": 64}
"""As the publisher recommends it for prompts beyond the trained length."""


def variant_of(name: str, target: Path, text: dict[str, Any], rope: dict[str, Any] | None = None) -> Path:
    """The golden checkpoint's files without weights, with other fields of the language model and its rope_scaling."""
    directory = copy_checkpoint(FAMILIES[name].directory, target)
    for path in directory.glob("*.safetensors*"):
        path.unlink()
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
