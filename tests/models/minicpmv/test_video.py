"""Frames that are read, groups that are fused, and temporal ids."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from models.interfaces.media import MediaItem, VideoFrames, VideoMetadata
from models.minicpmv.video import fused_pack, sample_fused, sample_unfused, temporal_ids
from service.graphs.buckets import fits
from tests.models.families.family import FAMILIES, minicpmv_item
from tests.models.minicpmv.golden import processor
from tests.support.encoder_replay import eager
from tests.support.inference import no_gradients as no_gradients


def metadata(seconds: float, fps: float) -> VideoMetadata:
    return VideoMetadata(num_frames=round(seconds * fps), fps=fps, duration=seconds, height=48, width=64)


def frames(clip: VideoMetadata, indices: list[int], fps: float | None = None) -> VideoFrames:
    picture = np.zeros((clip.height, clip.width, 3), dtype=np.uint8)
    times = tuple(index / clip.fps for index in indices)
    return VideoFrames(tuple(picture for _ in indices), tuple(indices), times, clip, requested_fps=fps)


def test_one_frame_a_second_up_to_64() -> None:
    assert sample_unfused(metadata(10, 25), None, 1000).indices == tuple(range(0, 250, 25))
    long = sample_unfused(metadata(100, 30), None, 1000).indices
    gap = 100 / 64
    assert long == tuple(30 * int(i * gap + gap / 2) for i in range(64))
    assert len(sample_unfused(metadata(10, 25), 5, 1000).indices) == 50
    assert len(sample_unfused(metadata(10, 25), 5, 8).indices) == 8


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
    sampling = sample_fused(clip, wanted, 100_000)
    assert (sampling.pack, len(sampling.indices)) == (pack, count)
    assert list(sampling.indices) == sorted(sampling.indices)
    assert sampling.indices[-1] < clip.num_frames
    assert fused_pack(clip, wanted, count) == pack


def test_fewer_frames_than_the_rule_fuse_as_needed() -> None:
    clip = metadata(1000, 25)
    for most, pack in ((64, 1), (180, 1), (181, 2), (720, 4)):
        sampling = sample_fused(clip, 3, most)
        assert (len(sampling.indices), sampling.pack) == (most, pack)
        assert fused_pack(clip, 3, most) == pack


@pytest.mark.parametrize("fps", [0.1, 0.5, 1.4, 2.0, 7.3, 30.0])
@pytest.mark.parametrize(("count", "read", "pack"), [(1, 1, 1), (10, 10, 1), (181, 181, 2), (2000, 1080, 6)])
def test_all_frames_of_a_list_are_read(fps: float, count: int, read: int, pack: int) -> None:
    clip = replace(metadata(count / fps, fps), listed=True)
    sampling = sample_fused(clip, fps, 5000)
    assert (len(set(sampling.indices)), sampling.pack) == (read, pack)
    assert fused_pack(clip, fps, read) == pack
    assert len(sample_fused(clip, fps, 7).indices) == min(7, count)


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


def test_times_that_a_sender_gives_may_begin_anywhere() -> None:
    clip = VideoMetadata(num_frames=4, fps=1.0, duration=4.0, height=48, width=64, listed=True)
    owner = processor("4.5")
    begun = [
        owner.video(replace(frames(clip, [0, 1, 2, 3]), times=times, times_given=True)).arrays["temporal_ids"].tolist()
        for times in ((0.0, 0.5, 1.0, 3.0), (100.0, 100.5, 101.0, 103.0))
    ]
    assert begun[0] == begun[1] == [0, 5, 10, 30]


def test_fusion_changes_the_digest() -> None:
    clip = metadata(100, 10)
    owner = processor("4.5")
    indices = owner.sample_video(clip, fps=4, max_frames=1000)
    pictures = frames(clip, indices).frames
    apart = owner.video_item(pictures[:4], [[0], [1], [2], [3]])
    fused = owner.video_item(pictures[:4], [[0, 1], [2, 3]])
    later = owner.video_item(pictures[:4], [[0, 1], [2, 4]])
    assert len({apart.digest, fused.digest, later.digest}) == 3


def of_groups(*groups: list[tuple[int, int, int]]) -> MediaItem:
    return minicpmv_item(list(groups), processor("4.5").config.num_queries, 0)


def test_parts_of_a_long_video_are_whole_groups() -> None:
    encoder = FAMILIES["minicpmv_4_5"].model.encoder
    video = of_groups(*[[(3, 3, 0), (3, 3, 1)]] * 5, [(6, 6, 9)], *[[(2, 2, 3)]] * 4)
    limit = {"patches": 54, "sequences": 6, "groups": 3, "max_seqlen": 36, "max_group_keys": 54}
    parts = encoder.split(video, limit)
    assert [part.arrays["group_sizes"].tolist() for part in parts] == [[2, 2, 2], [2, 2], [1, 1, 1], [1, 1]]
    assert all(fits(limit, encoder.required([part])) for part in parts)
    assert len({part.digest for part in parts}) == len(parts)
    whole = eager(encoder, [video])
    torch.testing.assert_close(torch.cat([eager(encoder, [part]) for part in parts]), whole, atol=3e-5, rtol=0)
    assert encoder.split(video, encoder.required([video])) == [video]


def test_a_group_over_the_limit_stays_whole() -> None:
    video = of_groups([(3, 3, 0)], [(7, 7, 1), (7, 7, 2)], [(3, 3, 3)])
    limit = {"patches": 20, "sequences": 6, "groups": 3, "max_seqlen": 36, "max_group_keys": 20}
    parts = FAMILIES["minicpmv_4_5"].model.encoder.split(video, limit)
    assert [part.num_sequences for part in parts] == [1, 2, 1]
