"""The processor against the golden prompts, and what untrusted text may not do."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import Environment
from PIL import Image
from tokenizers import Tokenizer as FastTokenizer

from models.checkpoints.published import read_json
from models.interfaces import resizing
from models.interfaces.errors import CheckpointError, InputError
from models.interfaces.media import ChatMessage, ContentPart, MediaItem, VideoFrames, VideoMetadata
from models.minicpmv.config import load_config
from models.minicpmv.encoder import part_of, patch_rows, slice_grids
from models.minicpmv.processor import load_processor
from models.minicpmv.slicing import SliceRule, slice_picture
from tests.models.minicpmv.golden import PROMPTS, VERSIONS, directory, expectations, golden_prompt, picture, processor
from tests.support.prompts import prompt_of


@pytest.mark.parametrize(("version", "name"), PROMPTS)
def test_golden_slices(version: str, name: str) -> None:
    prompt, reference = golden_prompt(version, name), expectations(version, name)
    slices = [frame for item in prompt.items for frame in item.frames]
    sizes = [(frame.shape[0] // 14, frame.shape[1] // 14) for frame in slices]
    np.testing.assert_array_equal(sizes, reference["tgt_sizes"])
    groups = np.concatenate([item.arrays["group_sizes"] for item in prompt.items])
    np.testing.assert_array_equal(groups, reference["group_sizes"])
    times = np.concatenate([item.arrays["temporal_ids"] for item in prompt.items])
    np.testing.assert_array_equal(times, reference.get("slice_temporal_ids", np.full(len(times), -1)))
    assert sum(item.num_patches for item in prompt.items) == sum(rows * columns for rows, columns in sizes)
    assert sum(item.num_sequences for item in prompt.items) == len(slices)
    assert sum(item.num_embeds for item in prompt.items) == sum(run.length for run in prompt.placeholders)
    if "pixel_u8" in reference:
        patches = [
            frame.reshape(rows, 14, columns, 14, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 588)
            for frame, (rows, columns) in zip(slices, sizes, strict=True)
        ]
        np.testing.assert_array_equal(np.concatenate(patches), reference["pixel_u8"])


def user(*content: str | int) -> ChatMessage:
    parts = (ContentPart(text=part) if isinstance(part, str) else ContentPart(item=part) for part in content)
    return ChatMessage("user", tuple(parts))


@pytest.mark.parametrize("version", VERSIONS)
def test_conversation_follows_the_published_template(version: str) -> None:
    owner = processor(version)
    config = read_json(directory(version), "tokenizer_config.json")
    messages = [
        ChatMessage("developer", (ContentPart(text="be brief ."),)),
        user("what is this ?"),
        ChatMessage("assistant", (ContentPart(text="a car ."),)),
        user("really ?", "look again ."),
    ]
    roles = ("system", "user", "assistant", "user")
    contents = ("be brief .", "what is this ?", "a car .", "really ?\nlook again .")
    template = Environment(trim_blocks=True, lstrip_blocks=True).from_string(config["chat_template"])
    text = template.render(
        messages=[{"role": role, "content": content} for role, content in zip(roles, contents, strict=True)],
        add_generation_prompt=True,
        enable_thinking=False,
        bos_token=config["bos_token"],
    )
    reference = FastTokenizer.from_file(str(directory(version) / "tokenizer.json"))
    has_opening = version == "2.5"
    prompt = prompt_of(owner, messages)
    assert prompt.token_ids.tolist() == reference.encode(text, add_special_tokens=not has_opening).ids
    assert prompt.placeholders == ()


def test_thinking() -> None:
    owner = processor("4.5")
    assert owner.reasoning_markers == ("<think>", "</think>")
    opened = prompt_of(owner, [user("why ?")], options={"enable_thinking": True})
    closed = prompt_of(owner, [user("why ?")], options={"enable_thinking": False})
    assert owner.detokenize(opened.token_ids.tolist()).endswith(b"<think>\n")
    marks = [owner.tokenizer.special_ids[marker] for marker in owner.reasoning_markers]
    assert [token for token in opened.token_ids.tolist() if token in marks] == marks[:1]
    assert [token for token in closed.token_ids.tolist() if token in marks] == marks
    assert owner.detokenize([marks[1]]) == b"</think>"
    assert prompt_of(owner, [user("why ?")]).token_ids.tolist() == closed.token_ids.tolist()


def test_reasoning_of_past_answers_is_left_out() -> None:
    owner = processor("4.5")

    def asked(answer: str) -> list[int]:
        turns = [user("why ?"), ChatMessage("assistant", (ContentPart(text=answer),)), user("and ?")]
        return prompt_of(owner, turns).token_ids.tolist()

    assert asked("<think>\nhm .\n</think>\n\nso .") == asked("so .")


@pytest.mark.parametrize("version", [version for version in VERSIONS if version != "2.5"])
def test_past_answers_without_reasoning_are_as_they_were_said(version: str) -> None:
    """But in 2.5, whose template trims messages."""
    owner = processor(version)

    def asked(answer: str) -> list[int]:
        turns = [user("why ?"), ChatMessage("assistant", (ContentPart(text=answer),)), user("and ?")]
        return prompt_of(owner, turns).token_ids.tolist()

    assert asked("\n\nso .") != asked("so .")
    if owner.reasoning_markers is None:
        assert b"so .</think>hm ." in owner.detokenize(asked("so .</think>hm ."))


def test_pictures_are_numbered_and_videos_are_not() -> None:
    owner = processor("2.6")
    image = owner.image(picture("2.6", "images/image0.png"))
    clip = VideoMetadata(num_frames=2, fps=1.0, duration=2.0, height=48, width=64)
    frames = tuple(np.asarray(picture("2.6", f"images/frame_{i}.png").convert("RGB")) for i in range(2))
    video = owner.video(VideoFrames(frames, (0, 1), (0.0, 1.0), clip))
    prompt = prompt_of(owner, [user(0, 1, 2, "x")], [image, video, image])
    assert [run.item for run in prompt.placeholders] == [0, 1, 1, 2]
    ids = prompt.token_ids.tolist()
    marker = owner.tokenizer.special_ids["<image_id>"]
    numbers = [owner.detokenize(ids[i + 1 : i + 2]) for i, token in enumerate(ids) if token == marker]
    assert numbers == [b"0", b"1"]


def changed(tmp_path: Path, version: str, **files: dict[str, object]) -> Path:
    """The golden directory with fields of its JSON files changed; None drops one."""
    shutil.copytree(directory(version), tmp_path / version, ignore=shutil.ignore_patterns("images", "*.safetensors"))
    for name, fields in files.items():
        path = tmp_path / version / f"{name}.json"
        content = {**read_json(path.parent, path.name), **fields}
        path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))
    return tmp_path / version


@pytest.mark.parametrize(("version", "penalty"), [("2.5", 1.05), ("4.5", 1.03)])
def test_recommended_sampling_where_the_file_names_none(tmp_path: Path, version: str, penalty: float) -> None:
    unnamed = dict.fromkeys(("temperature", "top_p", "top_k", "repetition_penalty"))
    path = changed(tmp_path, version, generation_config=unnamed)
    assert load_processor(path).generation_defaults == {
        "temperature": 0.7,
        "top_p": 0.8,
        "top_k": 100,
        "repetition_penalty": penalty,
    }
    (path / "generation_config.json").write_text('{"temperature": 0.1}')
    assert load_processor(path).generation_defaults == {"temperature": 0.1}


def test_slices_follow_the_preprocessors_file(tmp_path: Path) -> None:
    path = changed(
        tmp_path,
        "2.6",
        preprocessor_config={"max_slice_nums": 4, "scale_resolution": 112, "use_image_id": False},
        config={"slice_config": {"max_slice_nums": 9, "scale_resolution": 84}, "use_image_id": True},
    )
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


def test_crops_tile_the_refined_picture() -> None:
    rule = SliceRule(scale_resolution=84, unit=14, max_slices=9)
    pixels = np.random.default_rng(0).integers(0, 256, (200, 300, 3), dtype=np.uint8)
    sliced = slice_picture(Image.fromarray(pixels), rule)
    assert sliced.grid is not None
    (columns, rows), crops = sliced.grid, sliced.slices[1:]
    assert len(crops) == columns * rows
    whole = np.vstack([np.hstack(crops[row * columns : (row + 1) * columns]) for row in range(rows)])
    size = rule.refined_size(300, 200, sliced.grid)
    resized = Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(whole, np.asarray(resized))


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


@pytest.mark.parametrize("size", [(1, 1), (5000, 1), (1, 5000), (3000, 10)])
def test_thin_pictures_have_whole_patches(size: tuple[int, int]) -> None:
    slices = slice_picture(Image.new("RGB", size), RULE).slices
    assert all(piece.size and piece.shape[0] % 14 == piece.shape[1] % 14 == 0 for piece in slices)


def test_too_thin_pictures_are_refused() -> None:
    with pytest.raises(InputError, match="aspect ratio") as caught:
        slice_picture(Image.new("RGB", (60000, 1)), RULE)
    assert caught.value.field == "image_url"
