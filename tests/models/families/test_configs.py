"""Configurations that a family does not compute are refused by file and field; what files may leave out is known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest

from benchmarks.checkpoints.published import make
from models.checkpoints.published import read_json
from models.checkpoints.registry import family_of, resolve
from models.interfaces.errors import CheckpointError
from models.minicpmv.config import load_config as load_minicpmv
from models.qwen_vl.config import load_config as load_qwen2
from models.qwen_vl.v2_5.config import load_config as load_qwen2_5
from models.qwen_vl.v3.config import load_config as load_qwen3
from tests.models.families.family import FAMILIES
from tests.models.families.test_loading import ABSENT, change, json_of
from tests.support.golden import copy_checkpoint

CONFIG, PICTURES, VIDEOS = "config.json", "preprocessor_config.json", "video_preprocessor_config.json"
Case = tuple[str, str, dict[str, Any], str]
REFUSED = [line.split("\t") for line in Path(__file__).with_name("refused.tsv").read_text().splitlines()]
"""Family, file, section, fields of which "absent" is left out, message."""


@pytest.mark.parametrize("name", sorted({family for family, *_ in REFUSED}))
def test_configurations_that_do_not_fit_are_refused(tmp_path: Path, name: str) -> None:
    directory = copy_checkpoint(FAMILIES[name].directory, tmp_path / "broken")
    family = family_of(directory)
    for file, section, fields, message in (case for one, *case in REFUSED if one == name):
        published = (directory / file).read_text()
        values = {field: ABSENT if value == "absent" else value for field, value in json.loads(fields).items()}
        change(directory, file, values, section)
        with pytest.raises(CheckpointError, match=message):
            resolve(family.processor)(directory)
        (directory / file).write_text(published)


def test_heads_that_no_tensors_shape_contradicts_are_refused(tmp_path: Path) -> None:
    """The checkpoint would load and answer wrongly."""
    directory = copy_checkpoint(FAMILIES["minicpmv_2_6"].directory, tmp_path / "heads")
    change(directory, CONFIG, {"num_key_value_heads": 3})
    with pytest.raises(CheckpointError, match=r"num_attention_heads \d+ is not a multiple of .* 3"):
        FAMILIES["minicpmv_2_6"].loaded(directory, "random")


def test_a_width_that_is_not_the_files_is_refused(tmp_path: Path) -> None:
    family = FAMILIES["qwen2_5_vl"]
    directory = copy_checkpoint(family.directory, tmp_path / "narrow")
    change(directory, CONFIG, {"intermediate_size": ABSENT}, "vision_config")
    with pytest.raises(CheckpointError, match=r"mlp\.\w+\.\w+ has shape .*, expected .*3420"):
        family.loaded(directory)


def test_what_older_releases_of_transformers_leave_out_of_the_tower(tmp_path: Path) -> None:
    """They wrote the fields that differ from the class's defaults. So the files of many fine-tuned checkpoints are."""
    directory = make("qwen2_vl_2b", tmp_path)
    published = load_qwen2(directory)
    older = {"in_chans": 3, "model_type": "qwen2_vl", "spatial_patch_size": 14, "hidden_size": 1536}
    change(directory, CONFIG, {"vision_config": older})
    assert load_qwen2(directory).vision == published.vision


def test_what_older_releases_of_transformers_leave_out_of_a_tower_of_qwen2_5_vl(tmp_path: Path) -> None:
    directory = make("qwen2_5_vl_7b", tmp_path)
    published = load_qwen2_5(directory)
    older = {"hidden_size": 1280, "in_chans": 3, "spatial_patch_size": 14, "tokens_per_second": 2}
    change(directory, CONFIG, {"vision_config": older})
    assert load_qwen2_5(directory) == replace(published, shared=replace(published.shared, text=ANY))


def test_fields_that_a_published_file_of_qwen2_5_vl_leaves_out_are_the_architectures(tmp_path: Path) -> None:
    directory = copy_checkpoint(FAMILIES["qwen2_5_vl"].directory, tmp_path / "short")
    left_out = ("depth", "num_heads", "window_size", "fullatt_block_indexes")
    change(directory, CONFIG, dict.fromkeys(left_out, ABSENT), "vision_config")
    loaded = load_qwen2_5(directory)
    assert (loaded.shared.vision.depth, loaded.shared.vision.num_heads, loaded.window) == (32, 16, 4)
    assert loaded.full_attention == {7, 15, 23, 31}


def test_files_about_pictures_and_videos_of_qwen3_vl(tmp_path: Path) -> None:
    directory = copy_checkpoint(FAMILIES["qwen3_vl"].directory, tmp_path / "limits")
    published, settings = load_qwen3(directory), json_of(directory, PICTURES)
    # Limits called what they are hold for pictures alone.
    for file in (PICTURES, VIDEOS):
        change(directory, file, {"min_pixels": 5000, "max_pixels": 50_000})
    changed = load_qwen3(directory)
    assert (changed.images.min_pixels, changed.images.max_pixels) == (5000, 50_000)
    assert changed.videos == published.videos
    # A section of the newer file is read before the older one.
    newer = {**settings, "size": {"shortest_edge": 6000, "longest_edge": 60_000}}
    (directory / "processor_config.json").write_text(json.dumps({"image_processor": newer}))
    assert load_qwen3(directory).images.max_pixels == 60_000
    assert load_qwen3(directory).videos == published.videos
    # Without a file for videos that of pictures holds for them, as in transformers.
    (directory / "processor_config.json").unlink()
    (directory / PICTURES).write_text(json.dumps(settings))
    (directory / VIDEOS).unlink()
    assert load_qwen3(directory).videos == load_qwen3(directory).images == published.images
    assert load_qwen3(directory).frames == published.frames


def test_the_section_about_pictures_of_minicpmv_takes_the_place_of_the_older_file(tmp_path: Path) -> None:
    directory = copy_checkpoint(FAMILIES["minicpmv_2_6"].directory, tmp_path / "sections")
    published, older = load_minicpmv(directory), json_of(directory, PICTURES)
    newer = {"image_processor": {**older, "max_slice_nums": 1}}
    (directory / "processor_config.json").write_text(json.dumps(newer))
    for _ in range(2):  # Before the older file, and without it.
        assert load_minicpmv(directory) == replace(published, slicing=replace(published.slicing, max_slices=1))
        (directory / PICTURES).unlink(missing_ok=True)
    newer["image_processor"]["patch_size"] = 16
    (directory / "processor_config.json").write_text(json.dumps(newer))
    with pytest.raises(CheckpointError, match=r"processor_config\.json: image_processor: patch_size is 16, config"):
        load_minicpmv(directory)


def test_old_files_of_minicpmv_2_5_name_neither_version_nor_tower(tmp_path: Path) -> None:
    directory = copy_checkpoint(FAMILIES["minicpmv_2_5"].directory, tmp_path / "old")
    change(directory, CONFIG, {"version": ABSENT, "vision_config": ABSENT})
    config = load_minicpmv(directory)
    vision = config.vision
    assert config.version == "2.5"
    assert (vision.hidden_size, vision.intermediate_size, vision.num_layers, vision.table_side) == (1152, 4304, 27, 70)


def test_a_token_of_minicpmv_without_an_embedding_is_refused(tmp_path: Path) -> None:
    """One that was added to the tokenizer alone would be looked up behind the end of the embedding table."""
    directory = copy_checkpoint(FAMILIES["minicpmv_2_6"].directory, tmp_path / "added")
    rows = read_json(directory, CONFIG)["vocab_size"]
    change(directory, "tokenizer_config.json", {str(rows): {"content": "<|added|>"}}, "added_tokens_decoder")
    with pytest.raises(CheckpointError, match=f"tokenizer.json has {rows + 1} ids, config.json says vocab_size {rows}"):
        FAMILIES["minicpmv_2_6"].processor_of(directory)
