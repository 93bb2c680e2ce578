"""Pictures, videos and prompts of Qwen2-VL: sizes, frames, positions, digests, refusals."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from models.interfaces.errors import InputError
from models.interfaces.media import ChatMessage, MediaItem, VideoFrames, VideoMetadata
from models.qwen_vl.pictures import official_video_limits, sample_frames, smart_resize
from models.qwen_vl.positions import mrope_positions
from models.qwen_vl.processor import Qwen2VLProcessor, load_processor
from models.qwen_vl.v3.videos import sample_frames as sample_frames_of_qwen3
from service.hub import EMBEDDED
from tests.support.golden import GOLDEN
from tests.support.prompts import prompt_of, say

DIRECTORY = EMBEDDED / "qwen2_vl"


PUBLISHED = {"factor": 28, "min_pixels": 3136, "max_pixels": 12_845_056}


@pytest.fixture(scope="module")
def processor() -> Qwen2VLProcessor:
    return load_processor(DIRECTORY)


def metadata(num_frames: int, fps: float) -> VideoMetadata:
    return VideoMetadata(num_frames, fps, num_frames / fps if fps else 0.0, 120, 160)


def video_of(frames: list[np.ndarray]) -> VideoFrames:
    indices = tuple(range(len(frames)))
    return VideoFrames(tuple(frames), indices, tuple(map(float, indices)), metadata(max(len(frames), 1), 2.0))


@pytest.mark.parametrize(
    ("size", "resized", "at_one_megapixel"),
    [
        ((224, 224), (224, 224), (224, 224)),
        ((480, 640), (476, 644), (476, 644)),
        ((768, 1024), (756, 1036), (756, 1036)),
        ((1024, 1024), (1036, 1036), (980, 980)),
        ((1080, 1920), (1092, 1932), (728, 1316)),
        ((4000, 6000), (2912, 4368), (812, 1204)),
        ((20, 30), (56, 84), (56, 84)),
        ((42, 42), (56, 56), (56, 56)),
        ((70, 70), (56, 56), (56, 56)),
        ((1, 1), (56, 56), (56, 56)),
        ((14, 2700), (28, 784), (28, 784)),
    ],
)
def test_resized_sizes_of_the_reference(
    size: tuple[int, int], resized: tuple[int, int], at_one_megapixel: tuple[int, int]
) -> None:
    assert smart_resize(*size, **PUBLISHED) == resized
    assert smart_resize(*size, **{**PUBLISHED, "max_pixels": 1_003_520}) == at_one_megapixel


@pytest.mark.parametrize(
    ("num_frames", "fps", "asked", "max_frames", "pairs", "count"),
    [
        (300, 30.0, None, 768, 20, 20),
        (300, 30.0, 1.0, 768, 10, 10),
        (30, 30.0, None, 768, 4, 4),
        (3, 30.0, None, 768, 2, 3),
        (1, 30.0, None, 768, 1, 1),
        (100_000, 25.0, None, 768, 768, 768),
        (100_000, 25.0, None, 33, 32, 33),
        (90, 30.0, 2.5, 768, 6, 7),
        (50, 0.0, None, 768, 50, 50),
        (300, 30.0, None, 1, 1, 1),
        (61, 24.0, None, 768, 4, 5),
        (240, 24.0, 0.5, 768, 4, 5),
        (240, 24.0, 24.0, 64, 64, 64),
        (20_000, 24.0, None, 9999, 768, 768),
    ],
)
def test_frame_sampling(
    num_frames: int, fps: float, asked: float | None, max_frames: int, pairs: int, count: int
) -> None:
    """In whole pairs, and in Qwen3-VL any number."""
    for sample, expected in ((sample_frames, pairs), (sample_frames_of_qwen3, count)):
        indices = sample(metadata(num_frames, fps), fps=asked, max_frames=max_frames)
        assert len(indices) == expected and indices == sorted(set(indices))
        assert indices[0] == 0 and (expected == 1 or indices[-1] == num_frames - 1)
    assert indices == np.linspace(0, num_frames - 1, count).round().astype(int).tolist()


def test_a_long_video_fits_the_context(processor: Qwen2VLProcessor) -> None:
    limits = processor.video_limits
    indices = processor.sample_video(metadata(10**6, 25.0), fps=None, max_frames=10**6)
    frame_tokens = limits.frame_pixels(len(indices)) / 28**2
    assert len(indices) > 50 and len(indices) / 2 * frame_tokens < processor.context_length


def test_official_limits_of_the_published_model() -> None:
    limits = official_video_limits(12_845_056, 32768, 28)
    assert (limits.min_frame_pixels, limits.max_frame_pixels) == (100_352, 602_112)
    assert limits.frame_pixels(4) == 602_112
    assert limits.frame_pixels(10_000) == int(1.05 * 100_352)
    assert limits.frame_pixels(200) == int(int(0.9 * 32768 * 784) / 200 * 2)


def test_frames_of_a_video_stay_within_the_limits_of_pictures(processor: Qwen2VLProcessor) -> None:
    item = processor.video(video_of([np.zeros((1080, 1920, 3), dtype=np.uint8)] * 2))
    height, width, _ = item.frames[0].shape
    assert height * width <= processor.config.images.max_pixels


def test_media_that_cannot_be_taken(processor: Qwen2VLProcessor) -> None:
    with pytest.raises(InputError, match="200:1") as caught:
        processor.image(Image.new("RGB", (1, 400)))
    assert caught.value.field == "image_url"
    with pytest.raises(InputError, match="200:1") as caught:
        processor.video(video_of([np.zeros((2, 500, 3), dtype=np.uint8)]))
    assert caught.value.field == "video_url"
    with pytest.raises(InputError, match="no frames"):
        processor.sample_video(metadata(0, 25.0), fps=None, max_frames=8)


grids = st.tuples(st.integers(1, 9), st.integers(1, 4).map(lambda n: 2 * n), st.integers(1, 4).map(lambda n: 2 * n))


@given(runs=st.lists(st.tuples(st.integers(0, 4), grids), max_size=4), tail=st.integers(0, 5))
def test_positions_equal_a_token_by_token_walk(runs: list[tuple[int, tuple[int, int, int]]], tail: int) -> None:
    expected: list[tuple[int, int, int]] = []
    items = []
    offset = 0
    for text, (t, h, w) in runs:
        expected += [(offset + i,) * 3 for i in range(text)]
        offset += text
        items.append((len(expected), (t, h, w)))
        vision = [(offset + a, offset + b, offset + c) for a in range(t) for b in range(h // 2) for c in range(w // 2)]
        expected += vision
        offset = 1 + max(max(axes) for axes in vision)
    expected += [(offset + i,) * 3 for i in range(tail)]
    positions, following = mrope_positions(len(expected), items, merge_size=2)
    assert positions.T.tolist() == [list(axes) for axes in expected]
    assert following == offset + tail


def ids_of(processor: Qwen2VLProcessor, *messages: ChatMessage, items: tuple[MediaItem, ...] = ()) -> list[int]:
    return prompt_of(processor, messages, items).token_ids.tolist()


def specials(processor: Qwen2VLProcessor, ids: list[int]) -> list[str]:
    names = {token: name for name, token in processor.tokenizer.special_ids.items()}
    return [names[token] for token in ids if token in names]


def test_a_default_system_turn_and_the_roles(processor: Qwen2VLProcessor) -> None:
    ids = ids_of(processor, say("user", "Hi"))
    assert specials(processor, ids) == ["<|im_start|>", "<|im_end|>"] * 2 + ["<|im_start|>"]
    spoken = processor.detokenize(ids).decode()
    assert spoken == "system\nYou are a helpful assistant.\nuser\nHi\nassistant\n"
    assert processor.detokenize(ids_of(processor, say("developer", "Short."), say("user", "Hi"))).decode() == (
        "system\nShort.\nuser\nHi\nassistant\n"
    )


def test_borders_between_texts_do_not_change_the_ids(processor: Qwen2VLProcessor) -> None:
    assert ids_of(processor, say("user", "the pic", "ture shows")) == ids_of(
        processor, say("user", "the picture shows")
    )


def test_media_in_any_order_with_numbers(processor: Qwen2VLProcessor) -> None:
    picture = processor.image(Image.new("RGB", (84, 56), "red"))
    video = processor.video(video_of([np.zeros((56, 56, 3), np.uint8)] * 4))
    prompt = prompt_of(processor, [say("user", 1, "and", 0, 0)], [picture, video], options={"add_vision_id": True})
    assert [run.item for run in prompt.placeholders] == [1, 0, 0]
    for run in prompt.placeholders:
        item = prompt.items[run.item]
        assert run.length == item.num_embeds
        placeholder = {"image": processor.config.image_token_id, "video": processor.config.video_token_id}[item.kind]
        assert set(prompt.token_ids[run.start : run.start + run.length].tolist()) == {placeholder}
    text = processor.detokenize(prompt.token_ids.tolist()).decode()
    assert "Video 1: andPicture 1: Picture 2: " in text


def test_answers_end_at_a_turns_end_whatever_the_files_say(tmp_path: Path) -> None:
    shutil.copytree(DIRECTORY, tmp_path, dirs_exist_ok=True)
    (tmp_path / "generation_config.json").unlink()
    bare = load_processor(tmp_path)
    special = bare.tokenizer.special_ids
    assert {special["<|im_end|>"], special["<|endoftext|>"]} <= bare.stop_token_ids
    assert bare.generation_defaults == {}


def test_padding_rows_of_the_embedding_are_no_tokens() -> None:
    golden = load_processor(GOLDEN / "qwen2_vl")
    assert golden.vocab_size == 1 + golden.tokenizer.special_ids["<|video_pad|>"] < golden.config.text["vocab_size"]
