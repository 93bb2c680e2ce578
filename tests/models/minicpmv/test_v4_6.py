"""MiniCPM-V 4.6 and 4.7 where the families' suite cannot see them: settings of the files, slicing, sampling, canvas."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from models.interfaces.capturable import Plan
from models.interfaces.errors import InputError
from models.interfaces.media import MediaItem, VideoFrames, VideoMetadata
from models.minicpmv.slicing import SliceRule
from models.minicpmv.v4_6.encoder import MiniCPMV46Encoder, merge_of
from models.minicpmv.v4_6.model import load_model
from models.minicpmv.v4_6.processor import MAX_VIDEO_EMBEDS, MiniCPMV46Processor, load_processor, sample_frames
from service.graphs.buckets import pack
from tests.support.chat_golden import generate, golden_prompt, largest_difference
from tests.support.golden import GOLDEN, change_json, copy_checkpoint, inputs
from tests.support.inference import no_gradients as no_gradients
from tests.support.inline_engine import InlineEngine
from tests.support.slow import slow

DIRECTORIES = [GOLDEN / "minicpmv_4_6", GOLDEN / "minicpmv_4_7"]
NAMES = ("fine", "overview", "no_ids")
CHANGED = [*((DIRECTORIES[0], name) for name in NAMES), *(slow(DIRECTORIES[1], name) for name in NAMES)]
ON_EVERY = pytest.mark.parametrize("directory", [DIRECTORIES[0], slow(DIRECTORIES[1])], ids=lambda path: path.name)


def with_settings(directory: Path, target: Path, **fields: Any) -> Path:
    """A copy of a checkpoint whose processors have these fields."""
    changed = copy_checkpoint(directory, target)
    file = changed / "processor_config.json"
    settings = json.loads(file.read_text())
    change_json(file, {name: settings[name] | fields for name in ("image_processor", "video_processor")})
    return changed


@pytest.mark.parametrize(("directory", "name"), CHANGED, ids=lambda value: getattr(value, "name", value))
def test_prompts_under_other_settings(directory: Path, name: str, tmp_path: Path) -> None:
    """4x mode (smaller squares, no merger in the tower), overviews alone, and pictures without numbers."""
    golden, expected = inputs(directory)["prompts"][name], load_file(directory / "expected.safetensors")
    fields = {key: golden[key] for key in ("downsample_mode", "max_slice_nums", "use_image_id") if key in golden}
    changed = with_settings(directory, tmp_path / "changed", **fields)
    prompt = golden_prompt(load_processor(changed), directory, name)
    assert prompt.token_ids.tolist() == expected[f"prompt.{name}.input_ids"].tolist()
    if f"prompt.{name}.position_ids" in expected:
        assert prompt.positions.tolist() == expected[f"prompt.{name}.position_ids"].tolist()
    logits, _, ids = generate(load_model(changed, "cpu", torch.float32), prompt, 20)
    assert largest_difference(logits[-24:], expected[f"prompt.{name}.logits"]) <= 1e-4
    assert ids == expected[f"prompt.{name}.generated_ids"].tolist()


@ON_EVERY
def test_both_modes_in_one_engine(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other mode's graphs are captured once a request has used it, and no pass has items of both."""
    processor, model = load_processor(directory), load_model(directory, "cpu", torch.float32)
    encoder, passes = model.encoder, list[dict[str, int]]()

    def plan(items: Sequence[MediaItem]) -> Plan:
        made = MiniCPMV46Encoder.plan(encoder, items)
        passes.append(dict(made.required))
        return made

    monkeypatch.setattr(encoder, "plan", plan)
    engine = InlineEngine(model, processor, num_pages=1024, max_step_tokens=512, encoder_buckets=(640, 1280))
    runner = engine.worker._vision.runner
    expected = load_file(directory / "expected.safetensors")
    modes = {"image": "16x", "fine": "4x", "sliced": "16x", "video": "16x"}
    prompts = {name: golden_prompt(processor.modes[mode], directory, name) for name, mode in modes.items()}
    for turn in range(2):
        for name, prompt in prompts.items():
            engine.submit(f"{name} {turn}", prompt.salted(str(turn)), max_tokens=20)
        engine.run()
        for name in prompts:
            assert engine.tokens(f"{name} {turn}") == expected[f"prompt.{name}.generated_ids"].tolist()
        if not turn:
            assert runner.captured and not any(bucket["fine_sequences"] for bucket in runner.captured)
            while runner.capture_next(idle=True):
                pass
            assert 0 < sum(bucket["fine_sequences"] > 0 for bucket in runner.captured) <= 3 < len(encoder.rare_buckets)
            before = engine.steps()["encoder", "eager", "no_bucket"]
    assert engine.steps()["encoder", "eager", "no_bucket"] == before > 0
    assert all(bool(sizes["sequences"]) != bool(sizes["fine_sequences"]) for sizes in passes)
    items = [prompts[name].items for name in ("fine", "sliced")]
    assert {merge_of(item) for item in items[0]} == {2} and {merge_of(item) for item in items[1]} == {4}


@ON_EVERY
def test_a_picture_has_a_digest_for_each_mode(directory: Path) -> None:
    processor, picture = load_processor(directory), Image.new("RGB", (400, 300))
    coarse, fine = (processor.modes[mode].image(picture) for mode in ("16x", "4x"))
    assert coarse.digest == processor.image(picture).digest != fine.digest


@ON_EVERY
def test_slices_and_sampled_frames_are_the_references(directory: Path) -> None:
    golden = inputs(directory)
    for case in golden["slicing"]:
        unit = 56 if case["downsample_mode"] == "16x" else 28
        rule = SliceRule(case["scale_resolution"], unit, case["max_slice_nums"])
        width, height = case["width"], case["height"]
        grid = rule.grid(width, height)
        assert (grid and [grid[1], grid[0]]) == case["grid"]
        assert [*rule.overview_size(width, height, enlarge=grid is None)][::-1] == case["overview"]
        if grid:
            assert [*rule.refined_size(width, height, grid)][::-1] == case["refined"]
    for case in golden["sampling"]:
        if case["stack_frames"] == 1:
            metadata = VideoMetadata(case["total_num_frames"], case["fps"], case["duration"], 10, 10)
            assert sample_frames(metadata, fps=None, max_frames=case["max_num_frames"]) == case["indices"]


@pytest.mark.parametrize("count", [1, 2, 5, 12, 90])
@pytest.mark.parametrize("wanted", [1, 2, 4, 11, 60])
def test_a_short_clip_is_read_in_as_many_frames_as_are_asked_for(count: int, wanted: int) -> None:
    """Also if it is shorter than a tenth of a second. Of few frames at their own rate none is read twice."""
    metadata = VideoMetadata(count, 30.0, count / 30, 10, 10)
    indices = sample_frames(metadata, fps=metadata.fps, max_frames=wanted)
    assert len(indices) == len(set(indices)) == min(count, wanted)
    assert indices[0] == 0 and max(indices) < count


def published(directory: Path) -> MiniCPMV46Processor:
    """A processor that cuts pictures as published ones do."""
    processor = load_processor(directory)
    rules = {name: getattr(processor.config, name) for name in ("images", "videos")}
    rules = {name: replace(rule, slicing=SliceRule(448, 56, 9)) for name, rule in rules.items()}
    processor.config = replace(processor.config, **rules)
    return processor


@ON_EVERY
def test_a_video_is_read_in_as_many_frames_as_its_tokens_allow(directory: Path) -> None:
    """1080p takes 578 tokens a frame; 28 of them fit. Frames that a client has chosen are not left out."""
    processor = published(directory)
    metadata = VideoMetadata(3000, 25.0, 120.0, 1080, 1920)
    assert len(processor.sample_video(metadata, fps=None, max_frames=1000)) == MAX_VIDEO_EMBEDS // 578 == 28
    small = replace(metadata, height=448, width=448)
    assert len(processor.sample_video(small, fps=None, max_frames=1000)) == 120
    frames = (np.zeros((1080, 1920, 3), dtype=np.uint8),) * 29
    with pytest.raises(InputError, match=f"29 frames take {29 * 578} tokens, at most {MAX_VIDEO_EMBEDS}"):
        processor.video(VideoFrames(frames, tuple(range(29)), (0.0,) * 29, replace(metadata, listed=True)))


@pytest.mark.parametrize("size", [(448, 448), (1280, 720), (1920, 1080), (1344, 1344), (1240, 1754), (720, 1280)])
def test_usual_pictures_are_padded_by_at_most_5_percent(size: tuple[int, int]) -> None:
    directory = DIRECTORIES[0]
    processor = published(directory)
    encoder = load_model(directory, "meta", torch.float32, "random").encoder
    encoder.config = processor.config
    required = encoder.required([processor.image(Image.new("RGB", size))])
    (group,) = pack([required], encoder.default_buckets())
    assert group.bucket is not None and group.bucket["patches"] <= 1.05 * required["patches"]
