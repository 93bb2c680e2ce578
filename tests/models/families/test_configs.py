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
from tests.support.block_fp8 import FP8
from tests.support.golden import copy_checkpoint

CONFIG, PICTURES, VIDEOS = "config.json", "preprocessor_config.json", "video_preprocessor_config.json"
Case = tuple[str, str, dict[str, Any], str]
REFUSED: dict[str, list[Case]] = {
    "qwen2_vl": [
        (CONFIG, "", {"vision_config": ABSENT}, "vision_config is missing, expected an object"),
        (CONFIG, "", {"image_token_id": 4000}, "image_token_id"),
        # It used to load, with positions of one axis, and to answer wrongly.
        (CONFIG, "", {"rope_scaling": None}, r"rope_scaling\.mrope_section is None, expected three numbers"),
        (CONFIG, "", {"rope_scaling": {"type": "mrope"}}, r"rope_scaling\.mrope_section is None"),
        (
            CONFIG,
            "",
            {"rope_scaling": ABSENT, "rope_parameters": {"rope_theta": 1e6}},
            r"rope_parameters\.mrope_section is None",
        ),
        (CONFIG, "", {"rope_scaling": {"mrope_section": [4, 4]}}, r"mrope_section is \[4, 4\], expected three"),
        (
            CONFIG,
            "",
            {"rope_scaling": {"mrope_section": [1, 3, 4], "mrope_interleaved": True}},
            r"rope_scaling\.mrope_interleaved is true, expected false",
        ),
        (CONFIG, "", {"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        (CONFIG, "vision_config", {"rope_theta": 5.0}, r"vision_config\.rope_theta is 5\.0"),
        (
            CONFIG,
            "vision_config",
            {"rope_parameters": {"rope_theta": 5.0}},
            r"rope_parameters\.rope_theta is 5\.0, expected 10000\.0",
        ),
        (CONFIG, "vision_config", {"num_attention_heads": 1}, "num_attention_heads is 1, but num_he"),
        (CONFIG, "vision_config", {"num_heads": 7}, r"hidden_size \d+ is no multiple of num_heads 7"),
        (PICTURES, "", {"min_pixels": ABSENT}, "'shortest_edge' is missing"),
        (PICTURES, "", {"merge_size": 4}, "merge_size is 4, config.json says 2"),
        (PICTURES, "", {"resample": 2}, "resample is 2, expected 3"),
        (PICTURES, "", {"image_mean": 0.5}, "image_mean is 0.5, expected a list of numbers"),
        (PICTURES, "", {"image_std": [0.5, 0.5]}, r"image_std is \[0.5, 0.5\], expected 3 numbers"),
        (PICTURES, "", {"do_normalize": False}, "do_normalize is False, expected True"),
        (PICTURES, "", {"rescale_factor": 1 / 127.5}, "rescale_factor is 0.0078"),
        # transformers leaves these steps out, or takes another filter.
        *(
            (PICTURES, "", {name: None}, f"{name} is None, expected")
            for name in ("do_resize", "do_rescale", "do_normalize", "rescale_factor", "resample")
        ),
    ],
    "qwen2_5_vl": [
        (CONFIG, "vision_config", {"tokens_per_second": ABSENT}, "tokens_per_second is None, expected a number"),
        (CONFIG, "vision_config", {"hidden_size": ABSENT}, "'hidden_size' is missing"),
        (CONFIG, "vision_config", {"out_hidden_size": ABSENT}, "embeddings have 3584 values, expected the language"),
        (CONFIG, "vision_config", {"out_hidden_size": 48}, "embeddings have 48 values, expected the language model's"),
        (CONFIG, "vision_config", {"window_size": 100}, "window_size is 100, expected a multiple of 28"),
        (CONFIG, "vision_config", {"fullatt_block_indexes": [1, 40]}, r"is \[1, 40\], expected numbers of blocks"),
        (CONFIG, "vision_config", {"fullatt_block_indexes": ["1"]}, r"fullatt_block_indexes is \['1'\]"),
        (CONFIG, "vision_config", {"hidden_act": "quick_gelu"}, "hidden_act 'quick_gelu', expected 'silu'"),
    ],
    "qwen3_vl": [
        (CONFIG, "", {"vision_config": ABSENT}, "vision_config is missing"),
        (CONFIG, "", {"video_token_id": 4000}, "4000"),
        *(
            (CONFIG, "", {"quantization_config": {**FP8, **unknown}}, "quantization_config")
            for unknown in ({"fmt": "e5m2"}, {"weight_block_size": [16]}, {"quant_method": "awq"})
        ),
        (CONFIG, "text_config", {"rope_scaling": ABSENT}, r"rope_scaling\.mrope_section is None"),
        (CONFIG, "text_config", {"rope_scaling": {"mrope_section": [6, 5, 5]}}, "mrope_interleaved is None, expected"),
        (CONFIG, "vision_config", {"hidden_act": "gelu"}, "expected 'gelu_pytorch_tanh'"),
        (CONFIG, "vision_config", {"num_position_embeddings": 99}, "99 is not a square"),
        (CONFIG, "vision_config", {"deepstack_visual_indexes": [1, 2, 9]}, r"\[1, 2, 9\] must ascend within 0\.\.5"),
        (CONFIG, "vision_config", {"out_hidden_size": 64}, "out_hidden_size is 64"),
        (CONFIG, "vision_config", {"rope_parameters": {"rope_theta": 1e5}}, "rope_theta is 100000.0, expected 10000"),
        (CONFIG, "vision_config", {"num_heads": 7}, r"hidden_size \d+ is no multiple of num_heads 7"),
        *(
            (file, "", values, f"{file}: {message}")
            for file in (PICTURES, VIDEOS)
            for values, message in (
                ({"size": {"shortest_edge": 4096}}, "field 'longest_edge' is missing"),
                ({"merge_size": 4}, "merge_size is 4, config.json says 2"),
            )
        ),
        # The tower has one table for both, the pictures'.
        (VIDEOS, "", {"image_mean": [0.5, 0.4, 0.5]}, f"{VIDEOS}: .* are not those of pictures"),
        (VIDEOS, "", {"image_std": [0.5, 0.4, 0.5]}, f"{VIDEOS}: .* are not those of pictures"),
    ],
    "qwen3_vl_moe": [
        (CONFIG, "text_config", {"mlp_only_layers": [99]}, r"mlp_only_layers is \[99\]"),
        (CONFIG, "text_config", {"norm_topk_prob": False}, "norm_topk_prob is False"),
        (CONFIG, "text_config", {"moe_intermediate_size": ABSENT}, "moe_intermediate_size"),
        (
            CONFIG,
            "text_config",
            {"mlp_only_layers": [0, 1], "num_hidden_layers": 2},
            "mlp_only_layers leaves no layer with experts",
        ),
    ],
    "kimi_vl": [
        (CONFIG, "", {"media_placeholder_token_id": 5}, "media_placeholder_token_id 5 is no special token"),
        (CONFIG, "text_config", {"vocab_size": 555}, r"text_config\.vocab_size is 555"),
        *(
            (CONFIG, "text_config", {field: value}, rf"text_config\.{field}")
            for field, value in {
                "q_lora_rank": 1536,
                "n_group": 8,
                "scoring_func": "softmax",
                "rope_scaling": {"type": "yarn"},
                "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4},
                "rope_interleave": False,
                "tie_word_embeddings": True,
            }.items()
        ),
        (CONFIG, "vision_config", {"merge_kernel_size": [1, 1]}, r"vision_config\.merge_kernel_size"),
        (CONFIG, "vision_config", {"num_attention_heads": 7}, r"hidden_size \d+ is no multiple of num\w*heads 7"),
        (PICTURES, "", {"patch_size": 28}, "patch_size is 28, expected 14"),
        (PICTURES, "", {"merge_kernel_size": [3, 3]}, r"merge_kernel_size is \[3, 3\], expected \[2, 2\]"),
        (PICTURES, "", {"pad_input": False}, "pad_input is False, expected True"),
        (PICTURES, "", {"image_std": [0.5]}, r"image_std is \[0.5\], expected three numbers"),
        *((PICTURES, "", {field: ABSENT}, field) for field in ("patch_size", "in_token_limit", "image_mean")),
    ],
    "minicpmv_2_6": [
        (CONFIG, "", {"version": 2.0}, "version 2.0 is not hosted"),
        (CONFIG, "", {"query_num": ABSENT}, "field 'query_num' is missing"),
        (CONFIG, "vision_config", {"hidden_act": "gelu"}, "hidden_act 'gelu', expected 'gelu_pytorch_tanh'"),
        (CONFIG, "vision_config", {"num_attention_heads": 7}, r"hidden_size \d+ is no multiple of num\w*heads 7"),
        (PICTURES, "", {"patch_size": 16}, rf"{PICTURES}: patch_size is 16, config.json says 14"),
        (PICTURES, "", {"image_feature_size": 96}, rf"{PICTURES}: image_feature_size is 96, config.json says 8"),
        (PICTURES, "", {"norm_mean": [0.5, 0.4, 0.5]}, rf"{PICTURES}: norm_mean must be the same for all channels"),
        # Published processors leave such pictures at their own size.
        (PICTURES, "", {"slice_mode": False}, "slice_mode false is not supported; max_slice_nums 1 keeps the overview"),
    ],
}
"""File, section, fields, message."""


@pytest.mark.parametrize("name", REFUSED)
def test_configurations_that_do_not_fit_are_refused(tmp_path: Path, name: str) -> None:
    directory = copy_checkpoint(FAMILIES[name].directory, tmp_path / "broken")
    family = family_of(directory)
    for file, section, values, message in REFUSED[name]:
        published = (directory / file).read_text()
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
