"""Pictures, videos and prompts: sizes of the reference, bounds, refusals that name the field."""

from __future__ import annotations

import base64
import json
from copy import copy
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from tokenizers import Regex, pre_tokenizers

from models.interfaces.errors import CheckpointError, InputError
from models.interfaces.media import VideoFrames, VideoMetadata
from models.kimi_vl.pictures import ImageSettings
from models.kimi_vl.processor import KimiVLProcessor, load_processor
from models.kimi_vl.tokenizer import SPLIT_PATTERN, load_tokenizer
from tests.models.families.family import FAMILIES
from tests.support.golden import change_json, copy_checkpoint
from tests.support.prompts import prompt_of, say
from tests.support.rows import rows
from tests.support.slow import slow

PATCH = 14
DIRECTORY = FAMILIES["kimi_vl"].directory


def processor() -> KimiVLProcessor:
    return FAMILIES["kimi_vl"].processor


def blank(width: int, height: int) -> Image.Image:
    return Image.new("RGB", (width, height), (255, 255, 255))


def clip(frames: int, fps: float = 10.0, width: int = 84, height: int = 56) -> VideoMetadata:
    return VideoMetadata(frames, fps, frames / fps, height, width)


@pytest.mark.parametrize(
    ("size", "small", "large"),
    [
        ((224, 224), (16, 16), (16, 16)),
        ((448, 448), (32, 32), (32, 32)),
        ((640, 480), (36, 46), (36, 46)),
        ((896, 896), (64, 64), (64, 64)),
        ((1024, 1024), (66, 66), (74, 74)),
        ((1792, 1792), (64, 64), (128, 128)),
        ((1920, 1080), (48, 86), (78, 138)),
        slow((6000, 4000), (54, 80), (106, 158)),
        ((30, 20), (2, 4), (2, 4)),
        ((100, 7000), (500, 8), (500, 8)),
    ],
)
def test_grids_of_the_reference(size: tuple[int, int], small: tuple[int, int], large: tuple[int, int]) -> None:
    """Instruct and the first Thinking model allow 4096 patches, Thinking-2506 allows 16384."""
    for limit, expected in ((4096, small), (16384, large)):
        assert grid(*size, limit) == expected


def grid(width: int, height: int, limit: int) -> tuple[int, int] | None:
    limited = copy(processor())
    limited.images = ImageSettings(PATCH, limit, (0.5,) * 3, (0.5,) * 3)
    try:
        return tuple(*limited.image(blank(width, height)).arrays["grids"].tolist())
    except InputError:
        return None


side = st.one_of(st.integers(1, 60), st.integers(1, 1200), st.integers(1, 9000))


@settings(max_examples=20, deadline=None)
@given(side, side, st.sampled_from([10, 40, 1024, 4096]))
def test_no_picture_is_over_the_bound(width: int, height: int, limit: int) -> None:
    found = grid(width, height, limit)
    if found is not None:
        rows, columns = found
        assert rows % 2 == columns % 2 == 0 and max(found) <= 510
        assert rows * columns <= bound(limit)


@cache
def bound(limit: int) -> int:
    return ImageSettings(PATCH, limit, (0.5,) * 3, (0.5,) * 3).most_patches


def test_padding_is_black_and_right_and_below() -> None:
    patches = FAMILIES["kimi_vl"].model.encoder.plan([processor().image(blank(30, 20))]).tensors["pixels"][0]
    pixels = patches.view(2, 4, 3, PATCH, PATCH).permute(0, 3, 1, 4, 2).reshape(28, 56, 3)
    assert (pixels[:20, :30] == 255).all()
    assert not pixels[20:].any() and not pixels[:, 30:].any()


def test_low_detail_takes_a_quarter(tmp_path: Path) -> None:
    change_json(copy_checkpoint(DIRECTORY, tmp_path / "few") / "preprocessor_config.json", {"in_token_limit": 1024})
    owner = load_processor(tmp_path / "few")
    picture = blank(600, 600)
    assert owner.image(picture).num_embeds == 17 * 17
    assert owner.image(picture, detail="low").num_embeds == 9 * 9
    assert owner.image(picture).digest != owner.image(picture, detail="low").digest
    small = blank(28, 28)  # the limit is part of what a file is made into, even where it changes no size
    assert owner.image(small, source=b"x").digest != owner.image(small, detail="low", source=b"x").digest


@pytest.mark.parametrize("size", [(7169, 10), (13, 7141)])
def test_sides_over_the_rotary_table_are_refused(size: tuple[int, int]) -> None:
    with pytest.raises(InputError, match="7140") as refused:
        processor().image(blank(*size))
    assert refused.value.field == "image_url"
    pixels = np.zeros((size[1], size[0], 3), np.uint8)
    metadata = VideoMetadata(1, 1.0, 1.0, *pixels.shape[:2])
    with pytest.raises(InputError, match="7140") as refused:
        processor().video(VideoFrames((pixels,), (0,), (0.0,), metadata))
    assert refused.value.field == "video_url"
    assert processor().image(blank(7140, 10)).arrays["grids"].tolist() == [[2, 510]]


@given(st.integers(1, 4000), st.floats(0.5, 120), st.none() | st.floats(0.1, 60), st.integers(1, 300))
def test_frames_of_a_video(frames: int, rate: float, fps: float | None, most: int) -> None:
    """One from the middle of every equal stretch."""
    metadata = clip(frames, rate)
    indices = processor().sample_video(metadata, fps=fps, max_frames=most)
    assert len(indices) == max(1, min(round(metadata.duration * (fps or 1.0)), most, frames))
    assert indices == sorted(set(indices)) and indices[0] >= 0 and indices[-1] < frames
    # The ends are as far from the first and last frame as half a stretch.
    stretch = frames / len(indices)
    assert abs(indices[0] + 0.5 - stretch / 2) <= 1 and abs(frames - indices[-1] - 0.5 - stretch / 2) <= 1


def test_a_video_is_its_frames_as_pictures() -> None:
    rng = np.random.default_rng(0)
    frames = tuple(rng.integers(0, 256, (56, 28, 3), dtype=np.uint8) for _ in range(3))
    metadata = clip(3, 1.0, 28, 56)
    owner = processor()
    video = owner.video(VideoFrames(frames, (0, 1, 2), (0.0, 1.0, 2.0), metadata))
    pictures = [owner.image(Image.fromarray(frame), detail="low") for frame in frames]
    assert video.num_sequences == 3 and video.num_embeds == sum(picture.num_embeds for picture in pictures)
    as_video = prompt_of(owner, [say("user", 0, "what is this ?")], [video])
    as_pictures = prompt_of(owner, [say("user", 0, 1, 2, "what is this ?")], pictures)
    assert np.array_equal(as_video.token_ids, as_pictures.token_ids)
    assert [run.start for run in as_video.placeholders] == [run.start for run in as_pictures.placeholders]
    assert {run.item for run in as_video.placeholders} == {0}
    for frame, picture in zip(video.frames, pictures, strict=True):
        assert np.array_equal(frame, picture.frames[0])


def test_answers_end_at_the_end_of_a_turn(tmp_path: Path) -> None:
    """config.json knows only [EOS]; generation_config.json may add ids."""
    special = processor().tokenizer.special_ids
    turn_ends = {special["[EOS]"], special["<|im_end|>"], special["[EOT]"]}
    assert processor().stop_token_ids == turn_ends
    directory = copy_checkpoint(DIRECTORY, tmp_path / "sampled")
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [301, 9], "temperature": 0.6}))
    changed = load_processor(directory)
    assert changed.stop_token_ids == turn_ends | {9}
    assert changed.generation_defaults == {"temperature": 0.6}


@pytest.mark.slow
@pytest.mark.parametrize(("width", "height"), [(64, 48), (1280, 720), (4000, 30)])
def test_a_long_video_leaves_a_tenth_of_the_context_free(width: int, height: int) -> None:
    owner = processor()
    metadata = VideoMetadata(num_frames=10**6, fps=1.0, duration=1e6, height=height, width=width)
    indices = owner.sample_video(metadata, fps=None, max_frames=10**6)
    frames = (np.zeros((height, width, 3), dtype=np.uint8),) * len(indices)
    item = owner.video(VideoFrames(frames, tuple(indices), tuple(map(float, indices)), metadata))
    prompt = prompt_of(owner, [say("user", 0)], [item])
    spare = owner.context_length - len(prompt.token_ids)
    each = len(prompt.token_ids) // len(indices)
    assert 0.1 * owner.context_length - each - 40 < spare <= 0.1 * owner.context_length + each


TOKENIZER = load_tokenizer(DIRECTORY)
RANKS = [line.split() for line in (DIRECTORY / "tiktoken.model").read_text().splitlines()]
TIKTOKEN = tiktoken.Encoding(
    "kimi",
    pat_str=SPLIT_PATTERN,
    mergeable_ranks={base64.b64decode(token): int(rank) for token, rank in RANKS},
    special_tokens=dict(TOKENIZER.special_ids),
)
_PIECES = [
    *("the", " hello", "HTTP", "don't", "'LL", "12345", "你好", "世界", "한국어", "ʰ", "ǅ"),
    *("é", "\u0301", "🙂", "\r\n"),
]
ANY_TEXT = st.one_of(st.text(max_size=60), st.lists(st.sampled_from(_PIECES) | st.text(max_size=3)).map("".join))


@settings(max_examples=100, deadline=None)
@given(ANY_TEXT)
def test_equals_tiktoken(text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    assert TOKENIZER.encode_plain(text) == TIKTOKEN.encode(text, disallowed_special=())
    assert TOKENIZER.decode(TOKENIZER.encode_plain(text)) == text.encode()


def test_text_is_split_as_the_published_pattern_says() -> None:
    """Written out by hand: the comparison with tiktoken uses our pattern on both sides."""
    for pieces in rows(__file__, "split.jsonl"):
        split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated").pre_tokenize_str("".join(pieces))
        assert [piece for piece, _ in split] == pieces


@pytest.mark.parametrize("case", json.loads((DIRECTORY / "tokenizer_cases.json").read_text()))
def test_golden_cases(case: dict) -> None:
    assert TOKENIZER.encode_plain(case["text"]) == case["ids"]


def test_special_ids_give_no_bytes() -> None:
    end = TOKENIZER.special_ids["<|im_end|>"]
    assert TOKENIZER.decode([*TOKENIZER.encode_plain("a"), end, *TOKENIZER.encode_plain("b")]) == b"ab"


ALL_BYTES_BUT_THE_LAST = [*(bytes([value]) for value in range(255)), b"ab"]


@pytest.mark.parametrize("content", ["AA== 1\n", "AA==\n", "?? 0\n", "AA== 0\n", None])
def test_broken_rank_files_are_refused(tmp_path: Path, content: str | None) -> None:
    """None: without one of the single bytes. Text with that byte would silently lose it."""
    lines = (f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(ALL_BYTES_BUT_THE_LAST))
    (tmp_path / "tiktoken.model").write_text("\n".join(lines) if content is None else content)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tiktoken\.model" + (".*0xff" if content is None else "")):
        load_tokenizer(tmp_path)
