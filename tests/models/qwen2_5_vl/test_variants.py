"""Sizes of patches that the published ones are not, with random weights against transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from models.interfaces.media import ChatMessage, ContentPart
from models.qwen2_5_vl.model import load_model
from models.qwen2_5_vl.processor import load_processor
from tests.models.qwen2_5_vl.golden import DIRECTORY
from tests.support.golden import fact_of_own_fixture
from tests.support.prompts import prompt_of
from tests.support.random_reference import CPU, change_json, check_pictures, save_random, without_weights

pytestmark = fact_of_own_fixture


@pytest.mark.parametrize(
    ("patch", "merge", "temporal", "divisor"), [(14, 1, 1, 4), (14, 3, 1, 4), (7, 1, 1, 1), (16, 2, 2, 8)]
)
def test_embedding_rows_of_any_number_of_bytes(
    tmp_path: Path, patch: int, merge: int, temporal: int, divisor: int
) -> None:
    """Those of the published sizes are moved eight bytes at a time."""
    bytes_of_a_row = 3 * temporal * patch**2 * merge**2
    assert bytes_of_a_row % divisor == 0 and (divisor == 8 or bytes_of_a_row % (2 * divisor))
    directory = without_weights(DIRECTORY, tmp_path / "variant")
    vision = json.loads((directory / "config.json").read_text())["vision_config"]
    vision |= {"patch_size": patch, "spatial_merge_size": merge, "temporal_patch_size": temporal}
    vision["window_size"] = 2 * patch * merge
    change_json(directory / "config.json", {"vision_config": vision})
    sizes = {"patch_size": patch, "merge_size": merge, "temporal_patch_size": temporal}
    factor = patch * merge
    limits = {"min_pixels": factor**2, "max_pixels": 24 * factor**2}
    change_json(directory / "preprocessor_config.json", sizes | limits)
    reference, processor = save_random(directory), load_processor(directory)
    pixels = torch.randint(256, (5 * factor, 3 * factor, 3), dtype=torch.uint8).numpy()
    items = [processor.image(Image.fromarray(part)) for part in (pixels, pixels[: 2 * factor])]
    parts = (ContentPart(item=0), ContentPart(text="or"), ContentPart(item=1))
    prompt = prompt_of(processor, [ChatMessage("user", parts)], items)
    model = load_model(directory, CPU, torch.float32)
    check_pictures(reference, model, prompt, processor.config.image_token_id)


def test_yarn_beside_three_axes(tmp_path: Path) -> None:
    """As the publisher recommends it for prompts beyond the trained length, with the older name of the type."""
    directory = without_weights(DIRECTORY, tmp_path / "variant")
    sections = json.loads((directory / "config.json").read_text())["rope_scaling"]["mrope_section"]
    yarn = {"type": "yarn", "mrope_section": sections, "factor": 4, "original_max_position_embeddings": 64}
    change_json(directory / "config.json", {"rope_scaling": yarn})
    reference, processor = save_random(directory), load_processor(directory)
    picture = torch.randint(256, (150, 90, 3), dtype=torch.uint8).numpy()
    items = [processor.image(Image.fromarray(picture))]
    prompt = prompt_of(processor, [ChatMessage("user", (ContentPart(item=0), ContentPart(text="what?")))], items)
    model = load_model(directory, CPU, torch.float32)
    check_pictures(reference, model, prompt, processor.config.image_token_id)
