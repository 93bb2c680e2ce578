"""What loads as a chat family and what is refused: published and re-saved files, damaged tensors and configs."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from benchmarks.checkpoints.published import make
from models.checkpoints.published import read_json
from models.checkpoints.registry import family_of, resolve
from models.interfaces.errors import CheckpointError
from models.minicpmv.config import load_config as load_minicpmv
from models.qwen_vl.config import WindowConfig
from models.qwen_vl.config import load_config as load_qwen2
from models.qwen_vl.v3.config import load_config as load_qwen3
from tests.models.families.family import FAMILIES, META, Family
from tests.support.chat_golden import generate, largest_difference
from tests.support.golden import GOLDEN, copy_checkpoint, rename_as_in_memory
from tests.support.inference import no_gradients as no_gradients

ABSENT: Any = object()
SLOW = pytest.mark.slow


def json_of(directory: Path, file: str) -> dict[str, Any]:
    return json.loads((directory / file).read_text())


def change(directory: Path, file: str, values: dict[str, Any], section: str = "") -> None:
    """Write other fields, of a section of the file such as "outer.inner"; ABSENT removes one."""
    content = json_of(directory, file)
    target = reduce(getitem, section.split("."), content) if section else content
    target |= values
    for name in [name for name, value in target.items() if value is ABSENT]:
        del target[name]
    (directory / file).write_text(json.dumps(content))


def tensors_of(directory: Path) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for path in sorted(directory.glob("model*.safetensors")):
        found |= load_file(path)
    return found


def copy_of(family: Family, target: Path) -> Path:
    """With all tensors in one file."""
    copy_checkpoint(family.directory, target)
    tensors = tensors_of(target)
    for path in target.glob("*.safetensors*"):
        path.unlink()
    save_file(tensors, target / "model.safetensors")
    return target


def check_like_golden(family: Family, directory: Path) -> None:
    name = family.video_prompt if family.videos else family.multi
    prompt = family.prompt_by(name, family.processor_of(directory))
    logits, _, _ = generate(family.loaded(directory), prompt, 1)
    expected = family.of(name, "logits")
    assert largest_difference(logits[-len(expected) :], expected) <= 1e-4


def saved_by_transformers_5(directory: Path) -> None:
    import transformers

    (name,) = json_of(directory, "config.json")["architectures"]
    reference = getattr(transformers, name).from_pretrained(directory, dtype=torch.float32)
    (directory / "model.safetensors").unlink()
    reference.save_pretrained(directory, max_shard_size="200KB")
    assert "text_config" in json_of(directory, "config.json")
    assert len(list(directory.glob("*.safetensors"))) > 1


def nested_as_transformers_5_has_it(directory: Path) -> None:
    """Names of tensors in memory, too."""
    config = json_of(directory, "config.json")
    outside = {"architectures", "model_type", "vision_config", "image_token_id", "video_token_id"}
    text = {name: config.pop(name) for name in list(config) if name not in outside}
    text["rope_parameters"] = {**text.pop("rope_scaling"), "rope_theta": text.pop("rope_theta")}
    config["tie_word_embeddings"] = text.pop("tie_word_embeddings")
    (directory / "config.json").write_text(json.dumps(config | {"text_config": text}))
    rename_as_in_memory(directory)


def tie_inside_the_text_config(directory: Path) -> None:
    """transformers 4 saved it there; the field outside is a default then."""
    tied = json_of(directory, "config.json").get("tie_word_embeddings", False)
    saved_by_transformers_5(directory)
    change(directory, "config.json", {"tie_word_embeddings": tied}, "text_config")
    change(directory, "config.json", {"tie_word_embeddings": False})


def frequencies_of_older_writers(directory: Path) -> None:
    tables = ("model.rotary_emb.inv_freq", "model.layers.0.self_attn.rotary_emb.inv_freq")
    more = {name: torch.ones(8) for name in (*tables, "visual.rotary_pos_emb.inv_freq")}
    save_file(tensors_of(directory) | more, directory / "model.safetensors")


def sizes_in_a_newer_preprocessor_config(directory: Path) -> None:
    settings = json_of(directory, "preprocessor_config.json")
    settings["size"] = {"shortest_edge": settings.pop("min_pixels"), "longest_edge": settings.pop("max_pixels")}
    in_a_section_of_processor_config(directory, settings)


def in_a_section_of_processor_config(directory: Path, settings: dict[str, Any] | None = None) -> None:
    settings = settings or json_of(directory, "preprocessor_config.json")
    (directory / "preprocessor_config.json").unlink()
    (directory / "processor_config.json").write_text(json.dumps({"image_processor": settings}))


def a_copy_of_the_tied_head(directory: Path) -> None:
    tensors = tensors_of(directory)
    tensors["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"].clone()
    save_file(tensors, directory / "model.safetensors")


def a_tie_that_the_files_head_contradicts(directory: Path) -> None:
    section = "text_config" if "text_config" in json_of(directory, "config.json") else ""
    change(directory, "config.json", {"tie_word_embeddings": True}, section)


def rotary_positions_as_transformers_5_writes_them(directory: Path) -> None:
    text = json_of(directory, "config.json")["text_config"]
    newer = {"rope_theta": text["rope_theta"], "rope_type": "default"}
    beside = {"rope_theta": 2 * text["rope_theta"], "rope_scaling": ABSENT, "rope_interleave": True}
    change(directory, "config.json", {**beside, "rope_parameters": newer}, "text_config")


def experts_one_by_one(directory: Path) -> None:
    """As converters of other tools write them: each matrix [out, in] is a tensor."""
    save_file(apart(tensors_of(directory), transposed=True), directory / "model.safetensors")


def apart(tensors: dict[str, Tensor], *, transposed: bool = False) -> dict[str, Tensor]:
    """transposed: experts are stacked as [expert, in, out]."""
    found: dict[str, Tensor] = {}
    for name, values in tensors.items():
        prefix, stacked, kind = name.partition("mlp.experts.")
        if not stacked:
            found[name] = values
            continue
        for expert, value in enumerate(values.mT if transposed else values):
            parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
            for part, matrix in zip(parts, value.chunk(len(parts)), strict=True):
                found[f"{prefix}mlp.experts.{expert}.{part}.weight"] = matrix.contiguous()
    assert len(found) > len(tensors)
    return found


FORMS: list[tuple[str, Callable[[Path], None], bool]] = [
    ("qwen2_vl", saved_by_transformers_5, False),
    ("qwen2_5_vl", saved_by_transformers_5, True),
    ("qwen3_vl", saved_by_transformers_5, True),
    ("qwen3_vl_moe", saved_by_transformers_5, False),
    ("qwen2_vl", rename_as_in_memory, True),
    ("qwen2_5_vl", nested_as_transformers_5_has_it, False),
    ("qwen2_vl", tie_inside_the_text_config, True),
    ("qwen2_vl", frequencies_of_older_writers, False),
    ("qwen2_vl", sizes_in_a_newer_preprocessor_config, False),
    ("qwen3_vl", a_copy_of_the_tied_head, False),
    ("qwen3_vl_moe", a_tie_that_the_files_head_contradicts, False),
    ("minicpmv_4_5", a_tie_that_the_files_head_contradicts, False),
    ("kimi_vl", rotary_positions_as_transformers_5_writes_them, False),
    ("kimi_vl", in_a_section_of_processor_config, False),
    ("qwen3_vl_moe", experts_one_by_one, False),
]


@pytest.mark.parametrize(
    ("name", "rewrite"),
    [
        pytest.param(name, rewrite, id=f"{name}-{rewrite.__name__}", marks=[SLOW] if slow else [])
        for name, rewrite, slow in FORMS
    ],
)
def test_other_forms_of_a_checkpoint_load_as_the_published_one(
    tmp_path: Path, name: str, rewrite: Callable[[Path], None]
) -> None:
    directory = copy_of(FAMILIES[name], tmp_path / "copy")
    rewrite(directory)
    check_like_golden(FAMILIES[name], directory)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "kimi_vl", "minicpmv_4_5"])
def test_tensors_that_do_not_fit_are_named(tmp_path: Path, name: str) -> None:
    """Every seventh of the checkpoint: lost, misshapen, and with another beside it."""
    directory = copy_of(FAMILIES[name], tmp_path / "damaged")
    published = tensors_of(directory)
    for tensor in [key for key in sorted(published) if not key.endswith("inv_freq")][::7]:
        others = {key: value for key, value in published.items() if key != tensor}
        for written, message in (
            ({}, f"missing tensors: {tensor}$"),
            ({tensor: published[tensor][None]}, rf"{tensor} has shape \(1, "),
            ({tensor: published[tensor], f"{tensor}.other": torch.ones(8)}, f"unexpected tensors: {tensor}.other$"),
        ):
            save_file(others | written, directory / "model.safetensors")
            with pytest.raises(CheckpointError, match=message):
                FAMILIES[name].loaded(directory)


def test_the_router_of_kimi_vl_stays_in_float32(tmp_path: Path) -> None:
    """Its bias decides between near ties, whatever dtype the file has."""
    family = FAMILIES["kimi_vl"]
    directory, tensors = copy_of(family, tmp_path / "copy"), tensors_of(family.directory)
    name = "language_model.model.layers.1.mlp.gate.e_score_correction_bias"
    for dtype in (torch.float32, torch.bfloat16):
        save_file(tensors | {name: tensors[name].to(dtype)}, directory / "model.safetensors")
        model = family.fresh("cpu", torch.bfloat16, directory)
        routers = [value for key, value in model.named_parameters() if ".router." in key]
        assert routers and {value.dtype for value in routers} == {torch.float32}
        assert torch.equal(model.decoder.layers[1].mlp.router.bias, tensors[name].to(dtype).float())
        assert model.decoder.embed_tokens.weight.dtype == torch.bfloat16


def test_float16_of_qwen2_5_vl_is_refused() -> None:
    with pytest.raises(CheckpointError, match="overflows in float16"):
        FAMILIES["qwen2_5_vl"].fresh("cpu", torch.float16)


PUBLISHED = {
    "qwen2_vl_2b": (2_208_985_600, None),
    "qwen2_5_vl_3b": (3_754_622_976, 668_684_288),
    "qwen3_vl_2b": (2_127_532_032, 406_957_056),
    "qwen3_vl_8b": (8_767_123_696, 576_388_336),
    "qwen3_vl_30b_a3b": (31_070_754_032, 538_631_408),
    "qwen3_5_0_8b": (852_985_920, 100_592_896),
    "qwen3_5_2b": (2_213_241_664, 331_416_576),
    "qwen3_5_4b": (4_539_265_536, 333_514_240),
    "qwen3_5_9b": (9_409_813_744, 456_010_480),
    "qwen3_5_27b": (27_356_728_560, 460_730_096),
    "qwen3_5_35b_a3b": (35_107_181_936, 446_571_248),
    "kimi_vl_a3b": (16_407_656_048, 416_866_032 + 30_679_808),
    "minicpmv_4_5": (8_695_895_280, None),
    "minicpmv_4_6": (1_300_428_016, 548_266_416),
    "qwen3_asr_0_6b": (782_426_112, 186_376_192),
    "qwen3_asr_1_7b": (2_038_052_480, 317_477_504),
    "qwen3_aligner_0_6b": (917_728_896, 316_427_904),
}
"""Parameters, and those of the encoder."""
PADDING = {"qwen2_5_vl_3b": 32 * 36 * (3 * 1280 + 2), "minicpmv_4_5": 52 * 1152, "minicpmv_4_6": 52 * 1152}
"""Values beside them that align the encoder's rows in memory."""


@pytest.mark.parametrize(
    "size", [pytest.param(size, marks=[] if size.endswith(("vl_2b", "5_4b", "0_6b")) else [SLOW]) for size in PUBLISHED]
)
def test_published_sizes_have_the_published_numbers_of_parameters(tmp_path: Path, size: str) -> None:
    directory = make(size, tmp_path)
    model = resolve(family_of(directory).model)(directory, META, torch.bfloat16, "random")
    total, encoder = (
        sum(parameter.numel() for parameter in part.parameters()) - PADDING.get(size, 0)
        for part in (model, model.encoder)
    )
    if size == "kimi_vl_a3b":
        weight = model.encoder.patch_embed.weight  # Padded in memory.
        padding = weight.numel() - len(weight) * model.encoder.config.patch_values
        total, encoder = total - padding, encoder - padding
        assert sum(spec.bytes_per_token(torch.bfloat16) for spec in model.decoder.cache_specs()) == 31_104
    assert (total, encoder if PUBLISHED[size][1] else None) == PUBLISHED[size]


CONFIG, PICTURES, VIDEOS = "config.json", "preprocessor_config.json", "video_preprocessor_config.json"
REFUSED = [line.split("\t") for line in Path(__file__).with_name("refused.tsv").read_text().splitlines()]
"""Golden directory, file, section, fields of which "absent" is left out, message."""


@pytest.mark.parametrize("name", sorted({name for name, *_ in REFUSED}))
def test_configurations_that_do_not_fit_are_refused(tmp_path: Path, name: str) -> None:
    directory = copy_checkpoint(GOLDEN / name, tmp_path / "broken")
    for file, section, fields, message in (case for one, *case in REFUSED if one == name):
        published = (directory / file).read_text()
        values = {field: ABSENT if value == "absent" else value for field, value in json.loads(fields).items()}
        change(directory, file, values, section)
        with pytest.raises(CheckpointError, match=message):
            resolve(family_of(directory).processor)(directory)
        (directory / file).write_text(published)


def test_sizes_that_do_not_fit_the_tensors_or_one_another_are_refused(tmp_path: Path) -> None:
    """Also those that no tensor's shape contradicts: the checkpoint would load and answer wrongly."""
    width = FAMILIES["qwen3_vl_moe"].model.decoder.hidden_size
    for number, (name, section, fields, message) in enumerate(
        (
            ("minicpmv_2_6", "", {"num_key_value_heads": 3}, r"num_attention_heads \d+ is not a multiple of .* 3"),
            ("qwen3_vl_moe", "text_config", {"moe_intermediate_size": width}, "moe_intermediate_size makes square"),
            ("qwen3_vl_moe", "text_config", {"moe_intermediate_size": width // 2}, "makes square matrices"),
            ("qwen2_5_vl", "vision_config", {"intermediate_size": ABSENT}, r"mlp.* has shape .*, expected .*3420"),
        )
    ):
        directory = copy_checkpoint(FAMILIES[name].directory, tmp_path / str(number))
        change(directory, CONFIG, fields, section)
        with pytest.raises(CheckpointError, match=message):
            FAMILIES[name].loaded(directory)


def test_what_older_releases_of_transformers_leave_out_of_the_tower(tmp_path: Path) -> None:
    """They wrote the fields that differ from the class's defaults. So the files of many fine-tuned checkpoints are."""
    older = {"in_chans": 3, "spatial_patch_size": 14, "tokens_per_second": 2}
    for size, hidden in (("qwen2_vl_2b", 1536), ("qwen2_5_vl_7b", 1280)):
        directory = make(size, tmp_path)
        published = load_qwen2(directory)
        change(directory, CONFIG, {"vision_config": {**older, "hidden_size": hidden}})
        assert load_qwen2(directory) == replace(published, text=ANY)


def test_fields_that_a_published_file_of_qwen2_5_vl_leaves_out_are_the_architectures(tmp_path: Path) -> None:
    directory = copy_checkpoint(FAMILIES["qwen2_5_vl"].directory, tmp_path / "short")
    left_out = ("depth", "num_heads", "window_size", "fullatt_block_indexes")
    change(directory, CONFIG, dict.fromkeys(left_out, ABSENT), "vision_config")
    loaded = load_qwen2(directory)
    assert (loaded.vision.depth, loaded.vision.num_heads) == (32, 16)
    assert loaded.windows == WindowConfig(4, frozenset({7, 15, 23, 31}))


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
    with pytest.raises(CheckpointError, match=f"the tokenizer has {rows + 1} ids, config.json says vocab_size {rows}"):
        FAMILIES["minicpmv_2_6"].processor_of(directory)
