"""Templates, tokens and times of videos."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.interfaces.errors import InputError
from models.interfaces.media import MediaItem, VideoFrames, VideoMetadata
from models.qwen_vl.processor import Qwen2VLProcessor
from models.qwen_vl.windowed_vision import num_windows, windowed_frame
from tests.models.families.family import FAMILIES
from tests.support.prompts import prompt_of, say

DIRECTORY = FAMILIES["qwen2_5_vl"].directory


def processor() -> Qwen2VLProcessor:
    return FAMILIES["qwen2_5_vl"].processor


def video(sampled: int, total: int, fps: float, **more: object) -> MediaItem:
    """`sampled` of `total` frames, evenly."""
    metadata = VideoMetadata(total, fps, total / fps, 56, 84)
    indices = tuple(np.linspace(0, total - 1, sampled).round().astype(int).tolist())
    frames = tuple(np.full((56, 84, 3), index % 251, np.uint8) for index in range(sampled))
    times = tuple(index / fps for index in indices)
    return processor().video(replace(VideoFrames(frames, indices, times, metadata), **more))


@pytest.mark.parametrize(
    ("sampled", "total", "fps", "expected"),
    [
        (20, 300, 30.0, [0, 2, 4, 6, 8]),
        (20, 300, 29.97, [0, 2, 4, 6, 8]),
        (14, 175, 24.0, [0, 2, 4, 6, 8, 10, 12]),
        (4, 9, 4.0, [0, 2]),
        (4, 20, 30.0, [0, 0]),
        (768, 108_000, 30.0, [0, 18, 37, 56, 75, 93]),
    ],
)
def test_times_follow_the_sampled_rate(sampled: int, total: int, fps: float, expected: list[int]) -> None:
    times = video(sampled, total, fps).arrays["time_positions"]
    assert times.dtype == np.int32 and len(times) == sampled // 2
    assert times[: len(expected)].tolist() == expected


def test_videos_whose_time_leaves_the_context_are_refused() -> None:
    item = video(4, 5000 * 25, 25.0)
    with pytest.raises(InputError, match=r"too long: their time reaches position \d+ of a context of"):
        prompt_of(processor(), [say("user", 0)], [item])


def test_added_tokens_that_are_not_special_are_kept_in_answers_and_never_made_by_users() -> None:
    tokenizer = processor().tokenizer
    names = [token for token in ("<tool_call>", "</tool_call>", "<|fim_prefix|>") if token in tokenizer.special_ids]
    assert names
    for name in names:
        token = tokenizer.special_ids[name]
        assert processor().detokenize([token]) == name.encode()
        assert token not in prompt_of(processor(), [say("user", f"a {name} b")]).token_ids
    assert processor().detokenize([tokenizer.special_ids["<|im_end|>"]]) == b""


@given(rows=st.integers(1, 30), columns=st.integers(1, 30), window=st.integers(1, 6))
def test_windows_of_any_frame(rows: int, columns: int, window: int) -> None:
    """Every embedding row has one place, a window holds what its square of the frame holds, and none is empty."""
    frame = windowed_frame(2 * rows, 2 * columns, 2, window)
    assert sorted(frame.order.tolist()) == list(range(rows * columns))
    assert len(frame.lengths) == num_windows(rows, columns, window)
    assert frame.lengths.min() > 0 and frame.lengths.sum() == 4 * rows * columns
    square = (frame.order // columns // window) * (-(-columns // window)) + frame.order % columns // window
    assert square.tolist() == np.repeat(np.arange(len(frame.lengths)), frame.lengths // 4).tolist()
    units = frame.coordinates.reshape(-1, 4, 2)
    assert (units[:, 0] // 2 @ np.array([columns, 1])).tolist() == frame.order.tolist()
    assert (units - units[:, :1] == [[0, 0], [0, 1], [1, 0], [1, 1]]).all()
