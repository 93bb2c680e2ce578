"""The processor against the golden prompts, and what untrusted text may not do."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from models.interfaces import resizing
from models.interfaces.errors import CheckpointError, InputError
from models.interfaces.media import MediaItem, VideoFrames, VideoMetadata
from models.minicpmv.config import load_config
from models.minicpmv.encoder import part_of, patch_rows, slice_grids
from models.minicpmv.processor import MiniCPMVProcessor, load_processor
from models.minicpmv.slicing import SliceRule, slice_picture
from models.minicpmv.video import fused_pack, sample_fused, sample_unfused, temporal_ids
from models.text.processor import ChatProcessor
from service.graphs.buckets import fits
from tests.models.families.family import FAMILIES, Family, minicpmv_item
from tests.models.families.test_loading import ABSENT, change
from tests.models.minicpmv.golden import VERSIONS
from tests.support.encoder_replay import eager
from tests.support.golden import copy_checkpoint
from tests.support.inference import no_gradients as no_gradients
from tests.support.prompts import prompt_of, say


def family(version: str) -> Family:
    return FAMILIES[f"minicpmv_{version.replace('.', '_')}"]


def directory(version: str) -> Path:
    return family(version).directory


def processor(version: str) -> MiniCPMVProcessor:
    return family(version).processor


def picture(version: str, name: str) -> Image.Image:
    return Image.open(directory(version) / name)


def test_thinking() -> None:
    owner = processor("4.5")
    assert owner.reasoning_markers == ("<think>", "</think>")
    opened = prompt_of(owner, [say("user", "why ?")], options={"enable_thinking": True})
    closed = prompt_of(owner, [say("user", "why ?")], options={"enable_thinking": False})
    assert owner.detokenize(opened.token_ids.tolist()).endswith(b"<think>\n")
    marks = [owner.tokenizer.special_ids[marker] for marker in owner.reasoning_markers]
    assert [token for token in opened.token_ids.tolist() if token in marks] == marks[:1]
    assert [token for token in closed.token_ids.tolist() if token in marks] == marks
    assert owner.detokenize([marks[1]]) == b"</think>"
    assert prompt_of(owner, [say("user", "why ?")]).token_ids.tolist() == closed.token_ids.tolist()


def asked(owner: ChatProcessor, answer: str) -> list[int]:
    """Behind this answer."""
    turns = [say("user", "why ?"), say("assistant", answer), say("user", "and ?")]
    return prompt_of(owner, turns).token_ids.tolist()


def test_reasoning_of_past_answers_is_left_out() -> None:
    owner = processor("4.5")
    assert asked(owner, "<think>\nhm .\n</think>\n\nso .") == asked(owner, "so .")


@pytest.mark.parametrize("version", [version for version in VERSIONS if version != "2.5"])
def test_past_answers_without_reasoning_are_as_they_were_said(version: str) -> None:
    """But in 2.5, whose template trims messages."""
    owner = processor(version)
    assert asked(owner, "\n\nso .") != asked(owner, "so .")
    if owner.reasoning_markers is None:
        assert b"so .</think>hm ." in owner.detokenize(asked(owner, "so .</think>hm ."))


def test_pictures_are_numbered_and_videos_are_not() -> None:
    owner = processor("2.6")
    image = owner.image(picture("2.6", "images/image0.png"))
    clip = VideoMetadata(num_frames=2, fps=1.0, duration=2.0, height=48, width=64)
    frames = tuple(np.asarray(picture("2.6", f"images/frame_{i}.png").convert("RGB")) for i in range(2))
    video = owner.video(VideoFrames(frames, (0, 1), (0.0, 1.0), clip))
    prompt = prompt_of(owner, [say("user", 0, 1, 2, "x")], [image, video, image])
    assert [run.item for run in prompt.placeholders] == [0, 1, 1, 2]
    ids = prompt.token_ids.tolist()
    marker = owner.tokenizer.special_ids["<image_id>"]
    numbers = [owner.detokenize(ids[i + 1 : i + 2]) for i, token in enumerate(ids) if token == marker]
    assert numbers == [b"0", b"1"]


@pytest.mark.parametrize(("version", "penalty"), [("2.5", 1.05), ("4.5", 1.03)])
def test_recommended_sampling_where_the_file_names_none(tmp_path: Path, version: str, penalty: float) -> None:
    path = copy_checkpoint(directory(version), tmp_path / version)
    unnamed = dict.fromkeys(("temperature", "top_p", "top_k", "repetition_penalty"), ABSENT)
    change(path, "generation_config.json", unnamed)
    assert load_processor(path).generation_defaults == {
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 100,
        "repetition_penalty": penalty,
    }
    (path / "generation_config.json").write_text('{"temperature": 0.1}')
    assert load_processor(path).generation_defaults == {"temperature": 0.1}


def test_slices_follow_the_preprocessors_file(tmp_path: Path) -> None:
    path = copy_checkpoint(directory("2.6"), tmp_path / "2.6")
    newer = {"max_slice_nums": 4, "scale_resolution": 112, "use_image_id": False}
    change(path, "preprocessor_config.json", newer)
    older = {"slice_config": {"max_slice_nums": 9, "scale_resolution": 84}, "use_image_id": True}
    change(path, "config.json", older)
    config = load_config(path)
    assert (config.slicing.max_slices, config.slicing.scale_resolution, config.use_image_id) == (4, 112, False)
    large = picture("2.6", "images/big_0.png").resize((900, 900))
    assert load_processor(path).image(large).num_sequences == 5 < processor("2.6").image(large).num_sequences
    (path / "preprocessor_config.json").write_text(json.dumps({"max_slice_nums": 1}))
    whole = load_processor(path)
    assert whole.config.slicing.scale_resolution == 84 and whole.image(large).num_sequences == 1
    # Published processors leave such pictures at their own size.
    (path / "preprocessor_config.json").write_text(json.dumps({"slice_mode": False}))
    with pytest.raises(CheckpointError, match="slice_mode false is not supported; max_slice_nums 1 keeps the overview"):
        load_processor(path)


RULE = SliceRule(scale_resolution=448, unit=14, max_slices=9)


def patches(rule: SliceRule, width: int, height: int) -> list[tuple[int, int]]:
    """(rows, columns) of the overview and of one crop."""
    grid = rule.grid(width, height)
    sizes = [rule.overview_size(width, height, enlarge=grid is None)]
    if grid:
        refined = rule.refined_size(width, height, grid)
        sizes.append((refined[0] // grid[0], refined[1] // grid[1]))
    return [(h // 14, w // 14) for w, h in sizes]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 6000), st.floats(-1.0, 1.0))
def test_slices_fill_their_bucket(width: int, log4_aspect: float) -> None:
    height = max(1, round(width * 4.0**log4_aspect))
    if max(width / height, height / width) > 4:
        return
    sizes = patches(RULE, width, height)
    assert all(986 <= rows * columns <= 1056 for rows, columns in sizes)
    grid = RULE.grid(width, height)
    assert grid is None or 2 <= math.prod(grid) <= 9


@settings(max_examples=60, deadline=None)
@given(st.integers(40, 400), st.integers(40, 400), st.sampled_from([1, 2, 4]))
def test_the_encoders_device_cuts_the_same_patches(width: int, height: int, merge: int) -> None:
    pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    picture, rule = Image.fromarray(pixels), SliceRule(scale_resolution=112, unit=14 * merge, max_slices=9)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(resizing, "_on_device", True)
        cuts = [slice_picture(picture, rule, may_leave=may_leave) for may_leave in (False, True)]
    items = [MediaItem("image", cut.slices, cut.arrays, 0, 0, 0, b"") for cut in cuts]
    assert items[1].frames[0].shape == pixels.shape and slice_grids(items[:1], 14) == slice_grids(items[1:], 14)
    for first in range(len(items[0].frames)):
        parts = (patch_rows([part_of(item, first, first + 2, 14)], 14, merge, torch.device("cpu")) for item in items)
        assert torch.equal(*map(torch.cat, parts))


def test_thin_pictures_have_whole_patches_and_too_thin_ones_are_refused() -> None:
    for size in ((1, 1), (5000, 1), (1, 5000), (3000, 10)):
        slices = slice_picture(Image.new("RGB", size), RULE).slices
        assert all(piece.size and piece.shape[0] % 14 == piece.shape[1] % 14 == 0 for piece in slices)
    with pytest.raises(InputError, match="aspect ratio") as caught:
        slice_picture(Image.new("RGB", (60000, 1)), RULE)
    assert caught.value.field == "image_url"


def metadata(seconds: float, fps: float) -> VideoMetadata:
    return VideoMetadata(num_frames=round(seconds * fps), fps=fps, duration=seconds, height=48, width=64)


def frames(clip: VideoMetadata, indices: list[int], fps: float | None = None) -> VideoFrames:
    picture = np.zeros((clip.height, clip.width, 3), dtype=np.uint8)
    times = tuple(index / clip.fps for index in indices)
    return VideoFrames(tuple(picture for _ in indices), tuple(indices), times, clip, requested_fps=fps)


def test_one_frame_a_second_up_to_64() -> None:
    assert sample_unfused(metadata(10, 25), None, 1000) == list(range(0, 250, 25))
    gap = 100 / 64
    assert sample_unfused(metadata(100, 30), None, 1000) == [30 * int(i * gap + gap / 2) for i in range(64)]
    assert len(sample_unfused(metadata(10, 25), 5, 1000)) == 50
    assert len(sample_unfused(metadata(10, 25), 5, 8)) == 8


@pytest.mark.parametrize(
    ("seconds", "fps", "wanted", "pack", "count"),
    [
        (10, 30, None, 1, 30),
        (60, 30, 3, 1, 180),
        # Whole seconds alone decide against fusion.
        (60.9, 30, 3, 1, 183),
        (61, 30, 3, 2, 183),
        (100, 30, 5, 3, 500),
        (1000, 25, 3, 6, 1080),
        (30, 2, 5, 1, 60),
        (50, 0.4, None, 1, 20),
    ],
)
def test_fusion_by_duration_and_rate(seconds: float, fps: float, wanted: float | None, pack: int, count: int) -> None:
    clip = metadata(seconds, fps)
    indices, found = sample_fused(clip, wanted, 100_000)
    assert (found, len(indices)) == (pack, count)
    assert indices == sorted(indices) and indices[-1] < clip.num_frames
    assert fused_pack(clip, wanted, count) == pack


def test_fewer_frames_than_the_rule_fuse_as_needed() -> None:
    clip = metadata(1000, 25)
    for most, pack in ((64, 1), (180, 1), (181, 2), (720, 4)):
        indices, found = sample_fused(clip, 3, most)
        assert (len(indices), found) == (most, pack)
        assert fused_pack(clip, 3, most) == pack


@pytest.mark.parametrize("fps", [0.1, 0.5, 1.4, 2.0, 7.3, 30.0])
@pytest.mark.parametrize(("count", "read", "pack"), [(1, 1, 1), (10, 10, 1), (181, 181, 2), (2000, 1080, 6)])
def test_all_frames_of_a_list_are_read(fps: float, count: int, read: int, pack: int) -> None:
    clip = replace(metadata(count / fps, fps), listed=True)
    indices, found = sample_fused(clip, fps, 5000)
    assert (len(set(indices)), found) == (read, pack)
    assert fused_pack(clip, fps, read) == pack
    assert len(sample_fused(clip, fps, 7)[0]) == min(7, count)


def test_a_list_of_frames_without_a_rate() -> None:
    clip = VideoMetadata(num_frames=4, fps=0.0, duration=0.0, height=48, width=64)
    item = processor("4.5").video(frames(VideoMetadata(4, 1.0, 4.0, 48, 64), [0, 1, 2, 3]))
    assert item.arrays["group_sizes"].tolist() == [1, 1, 1, 1]
    assert temporal_ids([0.0, 0.0], clip).tolist() == [0, 0]


def test_temporal_ids_are_cut_as_published() -> None:
    clip = metadata(100, 10)
    ids = temporal_ids([k / 10 for k in range(1000)], clip)
    below = [k for k in range(1000) if ids[k] != k]
    assert below[:5] == [43, 81, 86, 91, 162]
    assert len(below) == 47
    assert all(ids[k] == k - 1 for k in below)


def test_fused_item() -> None:
    clip = metadata(100, 10)
    owner = processor("4.5")
    indices = owner.sample_video(clip, fps=4, max_frames=1000)
    item = owner.video(frames(clip, indices, fps=4))
    assert len(indices) == 400
    sizes = item.arrays["group_sizes"].tolist()
    assert sizes == [3] * 133 + [1]
    assert item.num_embeds == 134 * owner.config.num_queries
    assert item.num_sequences == 400
    np.testing.assert_array_equal(item.arrays["temporal_ids"], temporal_ids([i / 10 for i in indices], clip))


def test_fusion_changes_the_digest() -> None:
    owner, pictures = processor("4.5"), frames(metadata(100, 10), [0, 1, 2, 3]).frames
    apart = owner.video_item(pictures, [[0], [1], [2], [3]])
    fused = owner.video_item(pictures, [[0, 1], [2, 3]])
    later = owner.video_item(pictures, [[0, 1], [2, 4]])
    assert len({apart.digest, fused.digest, later.digest}) == 3


@pytest.mark.parametrize(
    ("groups", "room", "cuts"),
    [
        (
            [*[[(3, 3, 0), (3, 3, 1)]] * 5, [(6, 6, 9)], *[[(2, 2, 3)]] * 4],
            {"patches": 54, "max_group_keys": 54},
            [[2, 2, 2], [2, 2], [1, 1, 1], [1, 1]],
        ),
        # A group over the limit stays whole.
        ([[(3, 3, 0)], [(7, 7, 1), (7, 7, 2)], [(3, 3, 3)]], {"patches": 20, "max_group_keys": 20}, [[1], [2], [1]]),
    ],
)
def test_parts_of_a_long_video_are_whole_groups(
    groups: list[list[tuple[int, int, int]]], room: dict[str, int], cuts: list[list[int]]
) -> None:
    encoder = FAMILIES["minicpmv_4_5"].model.encoder
    video = minicpmv_item(groups, processor("4.5").config.num_queries, 0)
    limit = {"sequences": 6, "groups": 3, "max_seqlen": 36, **room}
    parts = encoder.split(video, limit)
    assert [part.arrays["group_sizes"].tolist() for part in parts] == cuts
    assert all(fits(limit, encoder.required([part])) for part in parts if part.num_patches <= limit["patches"])
    assert len({part.digest for part in parts}) == len(parts)
    whole = eager(encoder, [video])
    torch.testing.assert_close(torch.cat([eager(encoder, [part]) for part in parts]), whole, atol=3e-5, rtol=0)
    assert encoder.split(video, encoder.required([video])) == [video]
