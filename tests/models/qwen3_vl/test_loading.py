"""What loads as Qwen3-VL and what is refused: published and re-saved files, FP8, damaged configurations."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.checkpoints.published import make
from models.checkpoints.checkpoint import published_shapes
from models.interfaces.errors import CheckpointError
from models.qwen3_vl.config import load_config
from models.qwen3_vl.model import decoder_config, decoder_rules, load_model, vision_rules
from models.qwen3_vl.processor import load_processor
from tests.models.qwen3_vl.golden import BOTH, CPU, DENSE, MIXTURE, Golden
from tests.support.block_fp8 import FP8, quantised
from tests.support.chat_golden import generate, largest_difference

EITHER = [pytest.param(golden, id=kind) for kind, golden in BOTH.items()]


def copy_of(golden: Golden, target: Path) -> Path:
    """With all tensors in one file."""
    shutil.copytree(golden.directory, target, ignore=shutil.ignore_patterns("images", "expected*", "*.safetensors*"))
    save_file(tensors_of(golden), target / "model.safetensors")
    return target


def tensors_of(golden: Golden) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in sorted(golden.directory.glob("model*.safetensors")):
        found |= load_file(path)
    return found


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def check_like_golden(golden: Golden, directory: Path, tolerance: float = 1e-4) -> float:
    name = next(name for name in golden.prompts if golden.prompt(name).items)
    logits, _, _ = generate(load_model(directory, CPU, torch.float32), golden.prompt(name), 1)
    expected = golden.expected[f"prompt.{name}.logits"]
    difference = largest_difference(logits[-len(expected) :], expected)
    assert difference <= tolerance
    return difference


@pytest.mark.parametrize("golden", EITHER)
def test_what_transformers_5_saves_loads(golden: Golden, tmp_path: Path) -> None:
    import transformers

    directory = copy_of(golden, tmp_path / "saved")
    (name,) = json.loads((directory / "config.json").read_text())["architectures"]
    reference = getattr(transformers, name).from_pretrained(golden.directory, dtype=torch.float32)
    reference.save_pretrained(directory, max_shard_size="200KB")
    (directory / "model.safetensors").unlink()
    config = json.loads((directory / "config.json").read_text())
    assert "rope_parameters" in config["text_config"]
    assert len(list(directory.glob("*.safetensors"))) > 1
    check_like_golden(golden, directory)
    assert load_processor(directory).image  # its preprocessor files are those of the first


@pytest.mark.parametrize("golden", EITHER)
def test_tensors_are_the_published_ones_both_ways(golden: Golden, tmp_path: Path) -> None:
    config = load_config(golden.directory)
    rules = [*vision_rules(config.tower), *decoder_rules(decoder_config(config))]
    tensors = tensors_of(golden)
    assert published_shapes(golden.model, rules) == {name: tuple(value.shape) for name, value in tensors.items()}
    directory = copy_of(golden, tmp_path / "damaged")
    lost = "model.visual.deepstack_merger_list.1.norm.weight"
    for damaged, message in (
        ({name: value for name, value in tensors.items() if name != lost}, f"missing tensors: {lost}"),
        ({**tensors, "model.visual.other": torch.ones(2)}, r"unexpected tensors: model\.visual\.other"),
        ({**tensors, lost: torch.ones(5)}, rf"{lost} has shape \(5,\)"),
    ):
        save_file(damaged, directory / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            load_model(directory, CPU, torch.float32)


def apart(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As converters of other tools write experts: each matrix [out, in] is a tensor."""
    found: dict[str, Tensor] = {}
    for name, values in tensors.items():
        prefix, stacked, kind = name.partition("mlp.experts.")
        if not stacked:
            found[name] = values
            continue
        for expert, value in enumerate(values):
            parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
            for part, matrix in zip(parts, value.T.chunk(len(parts)), strict=True):
                found[f"{prefix}mlp.experts.{expert}.{part}.weight"] = matrix.contiguous()
    return found


def test_experts_may_be_stored_one_by_one(tmp_path: Path) -> None:
    directory = copy_of(MIXTURE, tmp_path / "apart")
    tensors = apart(tensors_of(MIXTURE))
    assert not any(name.endswith("gate_up_proj") for name in tensors)
    save_file(tensors, directory / "model.safetensors")
    loaded = load_model(directory, CPU, torch.float32)
    for (name, found), expected in zip(loaded.named_parameters(), MIXTURE.model.parameters(), strict=True):
        assert torch.equal(found, expected), name
    lost = "model.language_model.layers.1.mlp.experts.3.down_proj.weight"
    del tensors[lost]
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"missing tensors: {lost}"):
        load_model(directory, CPU, torch.float32)


def test_the_copy_of_a_tied_head_is_ignored_and_an_untied_head_must_be_there(tmp_path: Path) -> None:
    tied = copy_of(DENSE, tmp_path / "tied")
    tensors = tensors_of(DENSE)
    head = tensors["model.language_model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head}, tied / "model.safetensors")
    check_like_golden(DENSE, tied)
    untied = copy_of(MIXTURE, tmp_path / "untied")
    config = json.loads((untied / "config.json").read_text())
    change(untied / "config.json", text_config={**config["text_config"], "tie_word_embeddings": True})
    check_like_golden(MIXTURE, untied)
    save_file(
        {name: value for name, value in tensors_of(MIXTURE).items() if name != "lm_head.weight"},
        untied / "model.safetensors",
    )
    with pytest.raises(CheckpointError, match=r"missing tensors: lm_head\.weight"):
        load_model(untied, CPU, torch.float32)


def of_a_linear_layer(name: str) -> bool:
    """Of the language model."""
    return "_proj" in name and name.startswith("model.language_model.layers.")


@pytest.mark.parametrize("form", ["dense", "mixture", "experts one by one"])
def test_block_scaled_fp8_is_dequantised(form: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    golden = DENSE if form == "dense" else MIXTURE
    tensors = apart(tensors_of(golden)) if form == "experts one by one" else tensors_of(golden)
    stored, meant = quantised(tensors, of_a_linear_layer)
    plain, directory = copy_of(golden, tmp_path / "plain"), copy_of(golden, tmp_path / "fp8")
    save_file(meant, plain / "model.safetensors")
    # Factors in another file than their weights.
    (directory / "model.safetensors").unlink()
    for number, wanted in ((1, True), (2, False)):
        part = {name: value for name, value in stored.items() if name.endswith("_scale_inv") == wanted}
        save_file(part, directory / f"model-{number}.safetensors")
    change(directory / "config.json", quantization_config=FP8)
    with caplog.at_level(logging.INFO, logger="models.checkpoints.checkpoint"):
        loaded = load_model(directory, CPU, torch.float32)
    assert f"{len(stored) - len(meant)} weights in FP8" in caplog.text
    for (name, found), expected in zip(
        loaded.named_parameters(), load_model(plain, CPU, torch.float32).parameters(), strict=True
    ):
        torch.testing.assert_close(found, expected, atol=0, rtol=1e-6, msg=name)
    shapes = load_model(directory, torch.device("meta"), torch.bfloat16)
    assert all(parameter.is_meta for parameter in shapes.parameters())


def test_fp8_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    stored, _ = quantised(tensors_of(DENSE), of_a_linear_layer)
    directory = copy_of(DENSE, tmp_path / "fp8")
    change(directory / "config.json", quantization_config=FP8)
    name = "model.language_model.layers.0.self_attn.q_proj.weight"
    scale, norm = f"{name}_scale_inv", "model.language_model.norm.weight"
    for damaged, message in (
        ({key: value for key, value in stored.items() if key != scale}, f"missing tensor: {scale}"),
        ({**stored, scale: torch.ones(1, 1)}, rf"{scale} has shape \(1, 1\), expected"),
        ({**stored, "model.other_scale_inv": torch.ones(1, 1)}, r"unexpected tensors: model\.other_scale_inv"),
        (
            {**stored, norm: stored[norm].to(torch.float8_e4m3fn), f"{norm}_scale_inv": torch.ones(1, 6)},
            rf"{norm} has shape \(\d+,\); in FP8 only matrices",
        ),
    ):
        save_file(damaged, directory / "model.safetensors")
        with pytest.raises(CheckpointError, match=message):
            load_model(directory, CPU, torch.float32)
    save_file(stored, directory / "model.safetensors")
    change(directory / "config.json", quantization_config=None)
    with pytest.raises(CheckpointError, match="F8_E4M3"):
        load_model(directory, CPU, torch.float32)


@pytest.mark.parametrize("unknown", [{"fmt": "e5m2"}, {"weight_block_size": None}, {"quant_method": "awq"}])
def test_other_quantisations_are_refused(tmp_path: Path, unknown: dict[str, Any]) -> None:
    directory = copy_of(DENSE, tmp_path / "quantised")
    change(directory / "config.json", quantization_config={**FP8, **unknown})
    with pytest.raises(CheckpointError, match="quantization_config"):
        load_processor(directory)


@pytest.mark.parametrize(
    ("golden", "section", "values", "message"),
    [
        (DENSE, "", {"vision_config": None}, "vision_config is missing"),
        (DENSE, "", {"video_token_id": 4000}, "4000"),
        (DENSE, "text_config", {"rope_scaling": None}, r"rope_scaling\.mrope_section is None"),
        (DENSE, "text_config", {"rope_scaling": {"mrope_section": [6, 5, 5]}}, "mrope_interleaved is None, expected"),
        (DENSE, "vision_config", {"hidden_act": "gelu"}, "expected 'gelu_pytorch_tanh'"),
        (DENSE, "vision_config", {"num_position_embeddings": 99}, "99 is not a square"),
        (DENSE, "vision_config", {"deepstack_visual_indexes": [1, 2, 9]}, r"\[1, 2, 9\] must ascend within 0\.\.5"),
        (DENSE, "vision_config", {"out_hidden_size": 64}, "out_hidden_size is 64"),
        (DENSE, "vision_config", {"rope_parameters": {"rope_theta": 1e5}}, "rope_theta is 100000.0, expected 10000.0"),
        (MIXTURE, "text_config", {"mlp_only_layers": [99]}, r"mlp_only_layers is \[99\]"),
        (MIXTURE, "text_config", {"norm_topk_prob": False}, "norm_topk_prob is False"),
        (MIXTURE, "text_config", {"moe_intermediate_size": None}, "moe_intermediate_size"),
    ],
)
def test_configs_that_do_not_fit_are_refused(
    tmp_path: Path, golden: Golden, section: str, values: dict[str, Any], message: str
) -> None:
    directory = copy_of(golden, tmp_path / "broken")
    config = json.loads((directory / "config.json").read_text())
    target = config[section] if section else config
    target.update(values)
    for name in [name for name, value in values.items() if value is None]:
        del target[name]
    (directory / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=message):
        load_processor(directory)


@pytest.mark.parametrize("file", ["preprocessor_config.json", "video_preprocessor_config.json"])
def test_the_limits_of_pixels_must_be_in_the_files(tmp_path: Path, file: str) -> None:
    directory = copy_of(DENSE, tmp_path / "sizes")
    change(directory / file, size={"shortest_edge": 4096})
    with pytest.raises(CheckpointError, match=f"{file}: field 'longest_edge' is missing"):
        load_processor(directory)
    change(directory / file, size={"shortest_edge": 4096, "longest_edge": 40960}, merge_size=4)
    with pytest.raises(CheckpointError, match=f"{file}: merge_size is 4, config.json says 2"):
        load_processor(directory)


@pytest.mark.parametrize("field", ["image_mean", "image_std"])
def test_frames_that_are_normalised_in_another_way_than_pictures_are_refused(tmp_path: Path, field: str) -> None:
    """The tower has one table for both, the pictures'."""
    directory = copy_of(DENSE, tmp_path / "frames")
    change(directory / "video_preprocessor_config.json", **{field: [0.5, 0.4, 0.5]})
    with pytest.raises(CheckpointError, match=r"video_preprocessor_config.json: .* are not those of pictures"):
        load_processor(directory)
    change(directory / "preprocessor_config.json", **{field: [0.5, 0.4, 0.5]})
    assert load_processor(directory).video


def test_without_a_file_for_videos_that_of_pictures_holds_for_them(tmp_path: Path) -> None:
    """As in transformers: some fine-tuned checkpoints have only that one."""
    directory = copy_of(DENSE, tmp_path / "pictures")
    (directory / "video_preprocessor_config.json").unlink()
    loaded = load_config(directory)
    assert loaded.videos == loaded.images == DENSE.processor.config.images
    assert loaded.frames == DENSE.processor.config.frames
    assert load_processor(directory).video


def test_limits_called_what_they_are_hold_for_pictures_alone(tmp_path: Path) -> None:
    directory = copy_of(DENSE, tmp_path / "limits")
    published = load_config(directory)
    for file in ("preprocessor_config.json", "video_preprocessor_config.json"):
        change(directory / file, min_pixels=5000, max_pixels=50_000)
    changed = load_config(directory)
    assert (changed.images.min_pixels, changed.images.max_pixels) == (5000, 50_000)
    assert changed.videos == published.videos


def test_a_section_of_processor_config_is_read_before_the_older_file(tmp_path: Path) -> None:
    directory = copy_of(DENSE, tmp_path / "sections")
    settings = json.loads((directory / "preprocessor_config.json").read_text())
    newer = {**settings, "size": {"shortest_edge": 5000, "longest_edge": 50_000}}
    (directory / "processor_config.json").write_text(json.dumps({"image_processor": newer}))
    assert load_config(directory).images.max_pixels == 50_000
    assert load_config(directory).videos == DENSE.processor.config.videos


@pytest.mark.parametrize("golden", EITHER)
def test_random_weights_need_no_tensor_file(tmp_path: Path, golden: Golden) -> None:
    directory = copy_of(golden, tmp_path / "random")
    (directory / "model.safetensors").unlink()
    model = load_model(directory, CPU, torch.float32, "random")
    logits, _, _ = generate(model, golden.prompt(golden.prompts[1]), 1)
    assert logits.isfinite().all() and 0.1 < logits.std() < 10
    with pytest.raises(CheckpointError, match="no safetensors file"):
        load_model(directory, CPU, torch.float32)


@pytest.mark.parametrize(
    ("name", "total", "vision"),
    [
        ("qwen3_vl_2b", 2_127_532_032, 406_957_056),
        ("qwen3_vl_4b", 4_437_815_808, 415_347_712),
        ("qwen3_vl_8b", 8_767_123_696, 576_388_336),
        ("qwen3_vl_32b", 33_357_390_064, 595_266_800),
        ("qwen3_vl_30b_a3b", 31_070_754_032, 538_631_408),
    ],
)
def test_published_sizes_have_the_published_numbers_of_parameters(
    tmp_path: Path, name: str, total: int, vision: int
) -> None:
    model = load_model(make(name, tmp_path), torch.device("meta"), torch.bfloat16, "random")
    counts = [sum(parameter.numel() for parameter in part.parameters()) for part in (model, model.encoder)]
    assert counts == [total, vision]
