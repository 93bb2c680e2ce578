"""Qwen2.5-VL against the golden directory, through the production loaders."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from unittest.mock import ANY

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.checkpoints.published import make
from models.checkpoints.checkpoint import published_shapes, without_memory
from models.interfaces.errors import CheckpointError
from models.layers.decoder import DecoderConfig, decoder_rules
from models.qwen2_5_vl.config import load_config
from models.qwen2_5_vl.model import Qwen25VL, load_model, vision_rules
from models.qwen2_5_vl.processor import load_processor
from models.qwen2_vl.positions import frame_pair_seconds, time_positions
from tests.models.qwen2_5_vl.golden import (
    DIRECTORY,
    IMAGES,
    PROMPTS,
    TOKENS,
    VIDEO_LIMITS,
    VIDEO_PROMPT,
    VIDEOS,
    expected,
    golden_tokens,
    item,
    model,
    pack_order,
    prompt,
)
from tests.support.block_fp8 import FP8, quantised
from tests.support.chat_golden import encode, fill, generate, golden_prompt, largest_difference
from tests.support.golden import copy_checkpoint, rename_as_in_memory

CPU = torch.device("cpu")
ITEMS = (*IMAGES, *VIDEOS)


@pytest.mark.parametrize("name", ITEMS)
def test_preprocessing_is_exact(name: str) -> None:
    encoder = model().encoder
    assert [item(name).arrays["grid_thw"].tolist()] == expected()[f"{name}.grid_thw"].tolist()
    rows = encoder.patchify(item(name), CPU)
    assert hashlib.sha256(rows.numpy().tobytes()).digest() == bytes(expected()[f"{name}.pixel_sha256"].tolist())
    if f"{name}.pixel_u8" in expected():
        assert torch.equal(rows, expected()[f"{name}.pixel_u8"])
    assert torch.equal(encoder.byte_values.view(3, 256), expected()["norm_table"])


@pytest.mark.parametrize("name", ITEMS)
def test_windows_are_exact(name: str) -> None:
    arrays = model().encoder.plan([item(name)]).arrays
    for field in ("window_index", "cu_window_seqlens"):
        assert arrays[field].tolist() == expected()[f"{name}.{field}"].tolist()
    if f"{name}.coordinates" in expected():
        in_order = expected()[f"{name}.coordinates"].view(-1, 4, 2)[expected()[f"{name}.window_index"]]
        assert arrays["coordinates"].tolist() == in_order.view(-1, 2).tolist()


@pytest.mark.parametrize("name", ITEMS)
def test_embeddings(name: str) -> None:
    assert largest_difference(encode(model().encoder, [item(name)], CPU), expected()[f"{name}.embeds"]) <= 2e-5


@pytest.mark.parametrize("spare", [0, 4, 60])
def test_all_items_share_a_padded_call(spare: int) -> None:
    encoder = model().encoder
    plan = encoder.plan([item(name) for name in pack_order()])
    for field in ("window_index", "reverse_index", "cu_window_seqlens", "cu_seqlens"):
        assert plan.arrays[field].tolist() == expected()[f"pack.{field}"].tolist()
    patches = plan.required["patches"] + spare
    bucket = {name: size + spare // 4 for name, size in plan.required.items()} | {"patches": patches}
    buffers = fill(encoder.buffer_specs(bucket), plan, CPU)
    buffers["pixels"][plan.required["patches"] :] = 255
    buffers["coordinates"][plan.required["patches"] :] = 10_000
    with torch.inference_mode():
        embeds = encoder.forward(buffers, bucket)["embeds"]
    assert embeds.isfinite().all() and embeds.shape[0] == patches // 4
    together = expected()["pack.embeds"]
    assert largest_difference(embeds[: len(together)], together) <= 2e-5


def test_a_video_is_encoded_in_parts_of_whole_frame_pairs() -> None:
    encoder = model().encoder
    room = {"patches": 9999, "sequences": 999, "windows": 9999, "max_seqlen": 9999}
    for name in VIDEOS:
        video = item(name)
        pairs, required = video.num_sequences, encoder.required([video])
        assert pairs > 1, "a video of the fixture has frames for two parts"
        for size, least in (("patches", 3), ("windows", 0)):
            limit = required[size] // pairs * (pairs - 1) + least
            parts = encoder.split(video, room | {size: limit})
            assert [part.num_sequences for part in parts] == [pairs - 1, 1]
            assert len({part.digest for part in (*parts, video)}) == len(parts) + 1
        pieces = torch.cat([encode(encoder, [part], CPU) for part in parts])
        assert largest_difference(pieces, expected()[f"{name}.embeds"]) <= 2e-5
        assert len(encoder.split(video, room | {"sequences": 1})) == pairs
        assert encoder.split(video, room) == [video]


def test_time_is_multiplied_before_it_is_cut() -> None:
    table = expected()
    for seconds, index in zip(table["time.second_per_grid"].tolist(), table["time.index"].tolist(), strict=True):
        assert time_positions(frame_pair_seconds(len(index), seconds), 2).tolist() == index


@pytest.mark.parametrize("name", PROMPTS)
def test_ids_and_positions_are_exact(name: str) -> None:
    made = prompt(name)
    assert made.token_ids.tolist() == expected()[f"prompt.{name}.input_ids"].tolist()
    assert made.positions.tolist() == expected()[f"prompt.{name}.position_ids"].tolist()
    assert made.next_position - len(made.token_ids) == expected()[f"prompt.{name}.rope_delta"].item()


@pytest.mark.parametrize("chunk", [None, 17])
@pytest.mark.parametrize("name", PROMPTS)
def test_logits_and_greedy_tokens(name: str, chunk: int | None) -> None:
    logits, steps, ids = generate(model(), prompt(name), TOKENS, chunk=chunk)
    assert largest_difference(logits, expected()[f"prompt.{name}.logits"]) <= 1e-4
    assert ids == golden_tokens(name)
    assert largest_difference(steps, expected()[f"prompt.{name}.generated_logits"]) <= 1e-4


def test_the_wider_inner_width_changes_no_value() -> None:
    """It is a multiple of 128 in memory, and what was added is zero."""
    inner = json.loads((DIRECTORY / "config.json").read_text())["vision_config"]["intermediate_size"]
    assert inner % 128
    block = model().encoder.blocks[0].mlp
    wide = block.down.in_features
    assert wide % 128 == 0 and block.gate_up.weight.shape[0] == block.gate_up.bias.shape[0] == 2 * wide
    stored = load_file(DIRECTORY / "model.safetensors")
    for half, name in enumerate(("gate_proj", "up_proj")):
        for kind in ("weight", "bias"):
            rows = getattr(block.gate_up, kind).view(2, wide, -1)[half]
            values = stored[f"visual.blocks.0.mlp.{name}.{kind}"].float().view(inner, -1)
            assert torch.equal(rows[:inner], values) and not rows[inner:].any()
    assert not block.down.weight[:, inner:].any()


def check_like_golden(directory: Path) -> None:
    made = golden_prompt(load_processor(directory, video_limits=VIDEO_LIMITS), DIRECTORY, VIDEO_PROMPT)
    logits, _, _ = generate(load_model(directory, CPU, torch.float32), made, 1)
    assert largest_difference(logits, expected()[f"prompt.{VIDEO_PROMPT}.logits"]) <= 1e-4


def test_what_transformers_5_saves_loads(tmp_path: Path) -> None:
    from transformers import Qwen2_5_VLForConditionalGeneration

    directory = copy_checkpoint(DIRECTORY, tmp_path / "saved")
    reference = Qwen2_5_VLForConditionalGeneration.from_pretrained(DIRECTORY, dtype=torch.float32)
    reference.save_pretrained(directory, max_shard_size="200KB")
    (directory / "model.safetensors").unlink()
    assert "text_config" in json.loads((directory / "config.json").read_text())
    assert len(list(directory.glob("*.safetensors"))) > 1
    check_like_golden(directory)


def test_a_nested_config_and_names_in_memory_of_transformers_5_load(tmp_path: Path) -> None:
    directory = copy_checkpoint(DIRECTORY, tmp_path / "nested")
    config = json.loads((directory / "config.json").read_text())
    outside = {"architectures", "model_type", "vision_config", "image_token_id", "video_token_id"}
    text = {name: config.pop(name) for name in list(config) if name not in outside}
    text["rope_parameters"] = {**text.pop("rope_scaling"), "rope_theta": text.pop("rope_theta")}
    config["tie_word_embeddings"] = text.pop("tie_word_embeddings")
    config["vision_config"]["model_type"] = "qwen2_5_vl_vision"
    (directory / "config.json").write_text(json.dumps(config | {"text_config": text}))
    rename_as_in_memory(directory)
    check_like_golden(directory)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"visual.blocks.0.mlp.up_proj.bias": None}, r"missing tensors: visual\.blocks\.0\.mlp\.up_proj\.bias"),
        ({"visual.blocks.0.norm1.weight": torch.ones(47)}, r"visual\.blocks\.0\.norm1\.weight has shape \(47,\)"),
        ({"visual.blocks.0.norm1.bias": torch.ones(48)}, r"unexpected tensors: visual\.blocks\.0\.norm1\.bias"),
        ({"visual.blocks.0.mlp.gate_proj.weight": torch.ones(128, 48)}, r"gate_proj\.weight has shape \(128, 48\)"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, change: dict[str, Tensor | None], message: str) -> None:
    directory = copy_checkpoint(DIRECTORY, tmp_path / "damaged")
    tensors = {**load_file(directory / "model.safetensors"), **change}
    save_file({name: value for name, value in tensors.items() if value is not None}, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        load_model(directory, CPU, torch.float32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens_per_second": None}, "tokens_per_second is None, expected a number"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"out_hidden_size": None}, "embeddings have 3584 values, expected the language model's hidden_size"),
        ({"out_hidden_size": 48}, "embeddings have 48 values, expected the language model's hidden_size"),
        ({"window_size": 100}, "window_size is 100, expected a multiple of 28"),
        ({"fullatt_block_indexes": [1, 40]}, r"fullatt_block_indexes is \[1, 40\], expected numbers of blocks below"),
        ({"fullatt_block_indexes": ["1"]}, r"fullatt_block_indexes is \['1'\]"),
        ({"hidden_act": "quick_gelu"}, "hidden_act 'quick_gelu', expected 'silu'"),
    ],
)
def test_configs_that_do_not_fit_are_refused(tmp_path: Path, change: dict[str, object], message: str) -> None:
    directory = copy_checkpoint(DIRECTORY, tmp_path / "broken")
    config = json.loads((directory / "config.json").read_text())
    vision = {**config["vision_config"], **change}
    config["vision_config"] = {name: value for name, value in vision.items() if value is not None}
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        load_processor(directory)


def test_fields_that_a_published_file_leaves_out_are_the_architectures(tmp_path: Path) -> None:
    directory = copy_checkpoint(DIRECTORY, tmp_path / "short")
    config = json.loads((directory / "config.json").read_text())
    for name in ("depth", "num_heads", "window_size", "fullatt_block_indexes"):
        del config["vision_config"][name]
    (directory / "config.json").write_text(json.dumps(config))
    loaded = load_config(directory)
    assert (loaded.shared.vision.depth, loaded.shared.vision.num_heads, loaded.window) == (32, 16, 4)
    assert loaded.full_attention == {7, 15, 23, 31}


def test_what_older_releases_of_transformers_leave_out_of_a_tower_of_7b(tmp_path: Path) -> None:
    """They wrote the fields that differ from the class's defaults, as in the published file of 32B."""
    directory = make("qwen2_5_vl_7b", tmp_path)
    published = load_config(directory)
    config = json.loads((directory / "config.json").read_text())
    config["vision_config"] = {"hidden_size": 1280, "in_chans": 3, "spatial_patch_size": 14, "tokens_per_second": 2}
    (directory / "config.json").write_text(json.dumps(config))
    assert load_config(directory) == replace(published, shared=replace(published.shared, text=ANY))


def test_a_width_that_is_not_the_files_is_refused(tmp_path: Path) -> None:
    directory = copy_checkpoint(DIRECTORY, tmp_path / "narrow")
    config = json.loads((directory / "config.json").read_text())
    del config["vision_config"]["intermediate_size"]
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"mlp\.\w+\.\w+ has shape .*, expected .*3420"):
        load_model(directory, CPU, torch.float32)


def test_float16_is_refused() -> None:
    with pytest.raises(CheckpointError, match="overflows in float16"):
        load_model(DIRECTORY, CPU, torch.float16)


PUBLISHED = {
    "3b": (3_754_622_976, 668_684_288, 824),
    "7b": (8_292_166_656, 676_550_144, 729),
    "32b": (33_452_718_336, 688_841_984, 1161),
    "72b": (73_406_351_360, 700_147_712, 1353),
}
"""Parameters, those of the tower with its merger, and tensors."""


@pytest.mark.parametrize("size", PUBLISHED)
def test_parameters_and_tensors_of_the_published_sizes(tmp_path: Path, size: str) -> None:
    parameters, of_tower, tensors = PUBLISHED[size]
    loaded = load_config(make(f"qwen2_5_vl_{size}", tmp_path))
    decoder = DecoderConfig.from_published(loaded.shared.text, qkv_bias=True)
    with without_memory():
        made = Qwen25VL(loaded, decoder)
    counts = [sum(parameter.numel() for parameter in part.parameters()) for part in (made, made.encoder)]
    assert counts == [parameters, of_tower]
    rules = [*vision_rules(loaded.shared.vision), *decoder_rules(decoder)]
    assert len(published_shapes(made, rules)) == tensors


def test_block_scaled_fp8_is_dequantised(tmp_path: Path) -> None:
    """Linear layers of the language model, whose biases stay as they are."""
    directory = copy_checkpoint(DIRECTORY, tmp_path / "fp8")
    stored, meant = quantised(
        load_file(directory / "model.safetensors"),
        lambda name: name.startswith("model.layers.") and name.endswith("_proj.weight"),
    )
    save_file(stored, directory / "model.safetensors")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": FP8}))
    loaded = load_model(directory, CPU, torch.float32)
    plain = copy_checkpoint(DIRECTORY, tmp_path / "plain")
    save_file(meant, plain / "model.safetensors")
    for (name, found), value in zip(
        loaded.named_parameters(), load_model(plain, CPU, torch.float32).parameters(), strict=True
    ):
        torch.testing.assert_close(found, value, atol=0, rtol=1e-6, msg=name)


def test_random_weights_need_no_tensor_file(tmp_path: Path) -> None:
    directory = copy_checkpoint(DIRECTORY, tmp_path / "random")
    (directory / "model.safetensors").unlink()
    logits, _, _ = generate(load_model(directory, CPU, torch.float32, "random"), prompt(VIDEO_PROMPT), 1)
    assert logits.isfinite().all() and 0.1 < logits.std() < 10
    with pytest.raises(CheckpointError, match="no safetensors file"):
        load_model(directory, CPU, torch.float32)
