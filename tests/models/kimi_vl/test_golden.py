"""Kimi-VL against the golden directory, through the production loaders."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from models.interfaces.media import ChatMessage, ContentPart, MediaItem, VideoFrames, VideoMetadata
from models.kimi_vl.model import KimiVLModel, load_model
from models.kimi_vl.processor import KimiVLProcessor, load_processor
from tests.models.kimi_vl.golden import DIRECTORY, PROMPTS, TOKENS, expected, pictures
from tests.support.chat_golden import encode, fill, generate, golden_prompt, largest_difference
from tests.support.prompts import prompt_of

EXPECTED = expected()
PICTURES = pictures()
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def processor() -> KimiVLProcessor:
    return load_processor(DIRECTORY)


@pytest.fixture(scope="module")
def model() -> KimiVLModel:
    return load_model(DIRECTORY, CPU, torch.float32)


@pytest.fixture(scope="module")
def items(processor: KimiVLProcessor) -> list[MediaItem]:
    files = [DIRECTORY / f"images/{name.replace('.', '')}.png" for name in PICTURES]
    return [processor.image(Image.open(file).convert("RGB")) for file in files]


@pytest.mark.parametrize("index", range(len(PICTURES)))
def test_preprocessing_is_exact(items: list[MediaItem], model: KimiVLModel, index: int) -> None:
    item = items[index]
    assert item.arrays["grids"].tolist() == EXPECTED[f"image.{index}.grid_hw"].tolist()
    plan = model.encoder.plan([item])
    rows = plan.tensors["pixels"][0].view(-1, 3, 14, 14)
    table = EXPECTED["norm_table"]
    values = torch.stack([table[channel][rows[:, channel].long()] for channel in range(3)], dim=1)
    if f"image.{index}.pixel_u8" in EXPECTED:
        assert torch.equal(rows, EXPECTED[f"image.{index}.pixel_u8"])
    else:
        assert torch.equal(values, EXPECTED[f"image.{index}.pixel_values"])
    assert torch.equal(model.encoder.byte_values.view(3, 256), table)
    assert largest_difference(plan.tensors["positions"][0], EXPECTED[f"image.{index}.pos_embed"]) <= 2e-6


@pytest.mark.parametrize("index", range(len(PICTURES)))
def test_embeddings(items: list[MediaItem], model: KimiVLModel, index: int) -> None:
    embeds = encode(model.encoder, [items[index]], CPU)
    assert largest_difference(embeds, EXPECTED[f"image.{index}.embeds"]) <= 2e-5


@pytest.mark.parametrize("spare", [(0, 0), (4, 1), (60, 9)])
def test_all_pictures_share_a_padded_call(items: list[MediaItem], model: KimiVLModel, spare: tuple[int, int]) -> None:
    required = model.encoder.plan(items).required
    bucket = {
        "patches": required["patches"] + spare[0],
        "sequences": required["sequences"] + spare[1],
        "max_seqlen": required["patches"] + spare[0],
    }
    embeds = encode(model.encoder, items, CPU, bucket)
    assert largest_difference(embeds, torch.cat([EXPECTED[f"{name}.embeds"] for name in PICTURES])) <= 2e-5


def test_padding_rows_may_hold_anything(items: list[MediaItem], model: KimiVLModel) -> None:
    plan = model.encoder.plan(items[:2])
    bucket = {"patches": plan.required["patches"] + 32, "sequences": 5, "max_seqlen": plan.required["patches"] + 32}
    buffers = fill(model.encoder.buffer_specs(bucket), plan, CPU)
    buffers["positions"][plan.required["patches"] :] = float("nan")
    embeds = model.encoder.forward(buffers, bucket)["embeds"][: sum(item.num_embeds for item in items[:2])]
    assert largest_difference(embeds, torch.cat([EXPECTED[f"{name}.embeds"] for name in PICTURES[:2]])) <= 2e-5


def test_a_video_is_encoded_in_parts_of_whole_frames(processor: KimiVLProcessor, model: KimiVLModel) -> None:
    rng = np.random.default_rng(0)
    frames = tuple(rng.integers(0, 256, (56, 84, 3), dtype=np.uint8) for _ in range(5))
    metadata = VideoMetadata(num_frames=50, fps=10.0, duration=5.0, height=56, width=84)
    video = VideoFrames(frames, (5, 15, 25, 35, 45), (0.5, 1.5, 2.5, 3.5, 4.5), metadata)
    assert processor.sample_video(metadata, fps=None, max_frames=64) == list(video.indices)
    assert len(processor.sample_video(metadata, fps=10.0, max_frames=7)) == 7
    item = processor.video(video)
    assert item.num_sequences == 5
    limit = {"patches": 2 * item.num_patches // 5, "sequences": 9, "max_seqlen": 2 * item.num_patches // 5}
    parts = model.encoder.split(item, limit)
    assert [part.num_sequences for part in parts] == [2, 2, 1]
    assert len({part.digest for part in (*parts, item)}) == 4
    whole = encode(model.encoder, [item], CPU)
    pieces = torch.cat([encode(model.encoder, [part], CPU) for part in parts])
    assert largest_difference(pieces, whole) <= 2e-5
    assert model.encoder.split(item, model.encoder.default_buckets()[-1]) == [item]
    prompt = prompt_of(processor, [ChatMessage("user", (ContentPart(item=0),))], [item])
    assert [run.length for run in prompt.placeholders] == [item.num_embeds // 5] * 5


@pytest.mark.parametrize("name", PROMPTS)
def test_prompt_ids(processor: KimiVLProcessor, name: str) -> None:
    prompt = golden_prompt(processor, DIRECTORY, name)
    assert prompt.token_ids.tolist() == EXPECTED[f"prompt.{name}.input_ids"].tolist()
    assert np.array_equal(prompt.positions[0], np.arange(len(prompt.token_ids)))


@pytest.mark.parametrize("chunk", [None, 17])
@pytest.mark.parametrize("name", PROMPTS)
def test_logits_and_greedy_tokens(processor: KimiVLProcessor, model: KimiVLModel, name: str, chunk: int | None) -> None:
    prompt = golden_prompt(processor, DIRECTORY, name)
    logits, steps, ids = generate(model, prompt, TOKENS, chunk=chunk)
    if f"prompt.{name}.logits_tail8" in EXPECTED:
        assert largest_difference(logits[-8:], EXPECTED[f"prompt.{name}.logits_tail8"]) <= 1e-4
    else:
        assert largest_difference(logits, EXPECTED[f"prompt.{name}.logits"]) <= 1e-4
    assert ids == EXPECTED[f"prompt.{name}.generated_ids"].tolist()
    assert largest_difference(steps, EXPECTED[f"prompt.{name}.generated_logits"]) <= 1e-4
