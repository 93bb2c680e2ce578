"""Qwen2-VL against the golden directory, through the production loaders."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from benchmarks.checkpoints.published import make
from models.interfaces.errors import CheckpointError
from models.interfaces.media import MediaItem
from models.qwen2_vl.config import load_config
from models.qwen2_vl.model import load_model
from models.qwen2_vl.processor import load_processor
from tests.models.qwen2_vl.golden import (
    DIRECTORY,
    IMAGES,
    INPUTS,
    PROMPTS,
    TOKENS,
    VIDEO_LIMITS,
    VIDEO_PROMPT,
    VIDEOS,
    expected,
    golden_tokens,
    model,
    processor,
    prompt,
)
from tests.support.chat_golden import (
    encode,
    fill,
    generate,
    golden_prompt,
    golden_video,
    largest_difference,
    prompt_rows,
)
from tests.support.golden import copy_checkpoint, numbered, rename_as_in_memory
from tests.support.paged import PagedCache
from tests.support.random_reference import change_json

EXPECTED = expected()
CPU = torch.device("cpu")
ITEMS = (*IMAGES, *VIDEOS)
CONFIG = json.loads((DIRECTORY / "config.json").read_text())
TIED: bool = CONFIG.get("tie_word_embeddings", False)
TOWER = CONFIG["vision_config"]


@pytest.fixture(scope="module")
def items() -> dict[str, MediaItem]:
    pictures = {
        name: processor().image(Image.open(DIRECTORY / f"images/{name.replace('.', '')}.png").convert("RGB"))
        for name in IMAGES
    }
    videos = {name: processor().video(golden_video(DIRECTORY, files_of(name))) for name in VIDEOS}
    return {**pictures, **videos}


def files_of(video: str) -> list[str]:
    start = f"images/{video.removeprefix('video.')}_video_"
    files = [f"images/{path.name}" for path in (DIRECTORY / "images").iterdir()]
    return [f"{name}.png" for name in numbered(files, start, ".png")]


@pytest.mark.parametrize("name", ITEMS)
def test_preprocessing_is_exact(items: dict[str, MediaItem], name: str) -> None:
    item = items[name]
    assert [item.arrays["grid_thw"].tolist()] == EXPECTED[f"{name}.grid_thw"].tolist()
    rows = model().encoder.patchify(item, CPU)
    assert torch.equal(model().encoder.byte_values.view(3, 256), EXPECTED["norm_table"])
    if f"{name}.pixel_u8" in EXPECTED:
        assert torch.equal(rows, EXPECTED[f"{name}.pixel_u8"])
    if f"{name}.pixel_values" in EXPECTED:
        assert torch.equal(model().encoder.normalise(rows), EXPECTED[f"{name}.pixel_values"])


@pytest.mark.parametrize("name", ITEMS)
def test_embeddings(items: dict[str, MediaItem], name: str) -> None:
    assert largest_difference(encode(model().encoder, [items[name]], CPU), EXPECTED[f"{name}.embeds"]) <= 2e-5


@pytest.mark.parametrize("spare", [0, 4, 60])
def test_all_items_share_a_padded_call(items: dict[str, MediaItem], spare: int) -> None:
    plan = model().encoder.plan(list(items.values()))
    patches = plan.required["patches"] + spare
    bucket = {"patches": patches, "sequences": plan.required["sequences"] + spare // 4, "max_seqlen": patches}
    buffers = fill(model().encoder.buffer_specs(bucket), plan, CPU)
    buffers["pixels"][plan.required["patches"] :] = 255
    buffers["coordinates"][plan.required["patches"] :] = 10_000
    embeds = model().encoder.forward(buffers, bucket)["embeds"]
    assert embeds.isfinite().all() and embeds.shape[0] == patches // 4
    expected = torch.cat([EXPECTED[f"{name}.embeds"] for name in ITEMS])
    assert largest_difference(embeds[: len(expected)], expected) <= 2e-5


def test_a_video_is_encoded_in_parts_of_whole_frame_pairs(items: dict[str, MediaItem]) -> None:
    for name in VIDEOS:
        item = items[name]
        pairs = item.num_sequences
        assert pairs > 1, "a video of the fixture has frames for two parts"
        patches = (pairs - 1) * item.num_patches // pairs
        parts = model().encoder.split(item, {"patches": patches + 3, "sequences": 99, "max_seqlen": patches + 3})
        assert [part.num_sequences for part in parts] == [pairs - 1, 1]
        assert len({part.digest for part in (*parts, item)}) == len(parts) + 1
        pieces = torch.cat([encode(model().encoder, [part], CPU) for part in parts])
        assert largest_difference(pieces, EXPECTED[f"{name}.embeds"]) <= 2e-5
        for_sequences = model().encoder.split(item, {"patches": 9999, "sequences": 1, "max_seqlen": 9999})
        assert [part.num_sequences for part in for_sequences] == [1] * pairs
    image = items[IMAGES[0]]
    assert model().encoder.split(image, {"patches": 4, "sequences": 1, "max_seqlen": 4}) == [image]


@pytest.mark.parametrize("name", PROMPTS)
def test_ids_and_positions_are_exact(name: str) -> None:
    made = prompt(name)
    assert made.token_ids.tolist() == EXPECTED[f"prompt.{name}.input_ids"].tolist()
    assert made.positions.tolist() == EXPECTED[f"prompt.{name}.position_ids"].tolist()
    delta = made.next_position - len(made.token_ids)
    assert delta == EXPECTED[f"prompt.{name}.rope_delta"].item()


@pytest.mark.parametrize("chunk", [None, 17])
@pytest.mark.parametrize("name", PROMPTS)
def test_logits_and_greedy_tokens(name: str, chunk: int | None) -> None:
    logits, steps, ids = generate(model(), prompt(name), TOKENS, chunk=chunk)
    assert largest_difference(logits, EXPECTED[f"prompt.{name}.logits"]) <= 1e-4
    assert ids == golden_tokens(name)
    assert largest_difference(steps, EXPECTED[f"prompt.{name}.generated_logits"]) <= 1e-4


@torch.inference_mode()
def test_all_prompts_in_a_batch() -> None:
    """Prompts arrive one after the other; chunks of the newcomers share each batch with the decode rows."""
    decoder = model().decoder
    asked = {name: prompt(name) for name in PROMPTS}
    hidden = {name: prompt_rows(model(), one, CPU) for name, one in asked.items()}
    lengths = {name: len(one.token_ids) + TOKENS for name, one in asked.items()}
    num_pages = 1 + sum(-(-length // 8) for length in lengths.values())
    cache = PagedCache(decoder.cache_specs(), num_pages=num_pages, page_size=8)
    sequences = {name: cache.new_sequence(lengths[name]) for name in PROMPTS}
    generated: dict[str, list[int]] = {name: [] for name in PROMPTS}
    arrived: list[str] = []
    for step in range(sum(lengths.values())):
        arrived = list(PROMPTS[: step // 3 + 1])
        decodes = [name for name in arrived if 0 < len(generated[name]) < TOKENS]
        prefills = {
            name: min(50, len(asked[name].token_ids) - sequences[name].length)
            for name in arrived
            if not generated[name]
        }
        if not decodes and not prefills:
            break
        rows, positions = [], []
        for name in decodes:
            rows.append(decoder.embed(torch.tensor(generated[name][-1:])))
            step_position = asked[name].next_position + len(generated[name]) - 1
            positions.append(torch.full((3, 1), step_position))
        for name, count in prefills.items():
            chunk = slice(sequences[name].length, sequences[name].length + count)
            rows.append(hidden[name][chunk])
            positions.append(torch.from_numpy(asked[name].positions[:, chunk]))
        batch = cache.batch(
            [sequences[name] for name in decodes], [(sequences[name], count) for name, count in prefills.items()]
        )
        out = decoder.logits(decoder.forward(torch.cat(rows), torch.cat(positions, dim=1), batch))
        for name, logits in zip((*decodes, *prefills), out.split([len(row) for row in rows]), strict=True):
            if sequences[name].length >= len(asked[name].token_ids):
                generated[name].append(int(logits[-1].argmax()))
    for name in PROMPTS:
        assert generated[name] == golden_tokens(name), name


def check_like_golden(directory: Path) -> None:
    add_vision_id = INPUTS["prompts"][VIDEO_PROMPT]["add_vision_id"]
    loaded = load_processor(directory, video_limits=VIDEO_LIMITS)
    made = golden_prompt(loaded, DIRECTORY, VIDEO_PROMPT, add_vision_id=add_vision_id)
    logits, _, _ = generate(load_model(directory, CPU, torch.float32), made, 1)
    assert largest_difference(logits, EXPECTED[f"prompt.{VIDEO_PROMPT}.logits"]) <= 1e-4


def test_what_transformers_5_saves_loads(tmp_path: Path) -> None:
    from transformers import Qwen2VLForConditionalGeneration

    directory = copy_checkpoint(DIRECTORY, tmp_path / "saved")
    reference = Qwen2VLForConditionalGeneration.from_pretrained(DIRECTORY, dtype=torch.float32)
    reference.save_pretrained(directory, max_shard_size="200KB")
    (directory / "model.safetensors").unlink()
    assert "text_config" in json.loads((directory / "config.json").read_text())
    assert len(list(directory.glob("*.safetensors"))) > 1
    check_like_golden(directory)


def test_names_in_memory_of_transformers_5_load(tmp_path: Path) -> None:
    directory = copy_checkpoint(DIRECTORY, tmp_path / "renamed")
    rename_as_in_memory(directory)
    check_like_golden(directory)


def test_a_config_whose_rope_scaling_is_null_is_refused_by_field(tmp_path: Path) -> None:
    """It used to load, with positions of one axis, and to answer wrongly."""
    directory = copy_checkpoint(DIRECTORY, tmp_path / "null")
    config = {**json.loads((directory / "config.json").read_text()), "rope_scaling": None}
    (directory / "config.json").write_text(json.dumps(config))
    for load in (load_processor, lambda path: load_model(path, CPU, torch.float32)):
        with pytest.raises(CheckpointError, match=r"rope_scaling\.mrope_section"):
            load(directory)


def test_the_newer_name_of_rope_scaling_loads_in_a_flat_config(tmp_path: Path) -> None:
    directory = copy_checkpoint(DIRECTORY, tmp_path / "newer")
    config = json.loads((directory / "config.json").read_text())
    config["rope_parameters"] = {**config.pop("rope_scaling"), "rope_theta": config.pop("rope_theta")}
    (directory / "config.json").write_text(json.dumps(config))
    check_like_golden(directory)


def test_a_tie_inside_the_text_config_counts(tmp_path: Path) -> None:
    """transformers 4 saved it there; the field outside is a default then."""
    from transformers import Qwen2VLForConditionalGeneration

    directory = copy_checkpoint(DIRECTORY, tmp_path / "inside")
    reference = Qwen2VLForConditionalGeneration.from_pretrained(DIRECTORY, dtype=torch.float32)
    reference.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["tie_word_embeddings"], config["tie_word_embeddings"] = TIED, False
    (directory / "config.json").write_text(json.dumps(config))
    check_like_golden(directory)


def test_of_two_fields_about_rotary_positions_transformers_choice_counts(tmp_path: Path) -> None:
    """rope_scaling before rope_parameters, and rope_theta inside before one beside."""
    directory = copy_checkpoint(DIRECTORY, tmp_path / "two")
    config = json.loads((directory / "config.json").read_text())
    config["rope_scaling"]["rope_theta"] = config["rope_theta"]
    config |= {"rope_theta": 50.0, "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 1]}}
    (directory / "config.json").write_text(json.dumps(config))
    check_like_golden(directory)


def test_frequencies_of_older_writers_are_ignored(tmp_path: Path) -> None:
    directory = copy_checkpoint(DIRECTORY, tmp_path / "older")
    tensors = load_file(directory / "model.safetensors")
    tables = ("model.rotary_emb.inv_freq", "model.layers.0.self_attn.rotary_emb.inv_freq")
    for name in (*tables, "visual.rotary_pos_emb.inv_freq"):
        tensors[name] = torch.ones(8)
    save_file(tensors, directory / "model.safetensors")
    check_like_golden(directory)
    save_file({**tensors, "visual.other.inv_freq": torch.ones(8)}, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"unexpected tensors: visual\.other\.inv_freq"):
        load_model(directory, CPU, torch.float32)


def test_size_fields_of_a_newer_preprocessor_config_load(tmp_path: Path) -> None:
    directory = copy_checkpoint(DIRECTORY, tmp_path / "sized")
    settings = json.loads((directory / "preprocessor_config.json").read_text())
    settings["size"] = {"shortest_edge": settings.pop("min_pixels"), "longest_edge": settings.pop("max_pixels")}
    (directory / "preprocessor_config.json").unlink()
    (directory / "processor_config.json").write_text(json.dumps({"image_processor": settings}))
    check_like_golden(directory)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("config.json", {"vision_config": None}, "vision_config is missing, expected an object"),
        ("config.json", {"image_token_id": 4000}, "image_token_id"),
        ("config.json", {"rope_scaling": None}, r"rope_scaling\.mrope_section is None, expected three numbers"),
        ("config.json", {"rope_scaling": {"type": "mrope"}}, r"rope_scaling\.mrope_section is None"),
        (
            "config.json",
            {"rope_scaling": None, "rope_parameters": {"rope_theta": 1e6}},
            r"rope_parameters\.mrope_section is None",
        ),
        ("config.json", {"rope_scaling": {"mrope_section": [4, 4]}}, r"mrope_section is \[4, 4\], expected three"),
        (
            "config.json",
            {"rope_scaling": {"mrope_section": [1, 3, 4], "mrope_interleaved": True}},
            r"rope_scaling\.mrope_interleaved is true, expected false",
        ),
        ("config.json", {"vision_config": {**TOWER, "rope_theta": 5.0}}, r"vision_config\.rope_theta is 5\.0"),
        (
            "config.json",
            {"vision_config": {**TOWER, "rope_parameters": {"rope_theta": 5.0}}},
            r"rope_parameters\.rope_theta is 5\.0, expected 10000\.0",
        ),
        ("config.json", {"vision_config": {**TOWER, "num_attention_heads": 1}}, "num_attention_heads is 1, but num_he"),
        ("config.json", {"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ("preprocessor_config.json", {"min_pixels": None}, "'shortest_edge' is missing"),
        ("preprocessor_config.json", {"merge_size": 4}, "merge_size is 4, config.json says 2"),
        ("preprocessor_config.json", {"resample": 2}, "resample is 2, expected 3"),
        ("preprocessor_config.json", {"image_mean": 0.5}, "image_mean is 0.5, expected a list of numbers"),
        ("preprocessor_config.json", {"image_std": [0.5, 0.5]}, r"image_std is \[0.5, 0.5\], expected 3 numbers"),
        ("preprocessor_config.json", {"do_normalize": False}, "do_normalize is False, expected True"),
        ("preprocessor_config.json", {"rescale_factor": 1 / 127.5}, "rescale_factor is 0.0078"),
    ],
)
def test_configs_that_do_not_fit_are_refused(
    tmp_path: Path, file: str, change: dict[str, object], message: str
) -> None:
    directory = copy_checkpoint(DIRECTORY, tmp_path / "broken")
    content = {**json.loads((directory / file).read_text()), **change}
    content = {key: value for key, value in content.items() if value is not None}
    (directory / file).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=message):
        load_processor(directory)


@pytest.mark.parametrize(("size", "written"), [("2b", {"hidden_size": 1536}), ("7b", {})])
def test_what_older_releases_of_transformers_leave_out_of_the_tower(
    tmp_path: Path, size: str, written: dict[str, int]
) -> None:
    """They wrote the fields that differ from the class's defaults. So the files of many fine-tuned checkpoints are."""
    directory = make(f"qwen2_vl_{size}", tmp_path)
    published = load_config(directory)
    config = json.loads((directory / "config.json").read_text())
    config["vision_config"] = {"in_chans": 3, "model_type": "qwen2_vl", "spatial_patch_size": 14, **written}
    (directory / "config.json").write_text(json.dumps(config))
    assert load_config(directory).vision == published.vision


@pytest.mark.parametrize("name", ["do_resize", "do_rescale", "do_normalize", "rescale_factor", "resample"])
def test_steps_of_null_are_refused(tmp_path: Path, name: str) -> None:
    """transformers leaves them out, or takes another filter."""
    directory = copy_checkpoint(DIRECTORY, tmp_path / "null")
    change_json(directory / "preprocessor_config.json", {name: None})
    with pytest.raises(CheckpointError, match=f"{name} is None, expected"):
        load_processor(directory)


def test_random_weights_need_no_tensor_file(tmp_path: Path) -> None:
    directory = copy_checkpoint(DIRECTORY, tmp_path / "random")
    (directory / "model.safetensors").unlink()
    logits, _, _ = generate(load_model(directory, CPU, torch.float32, "random"), prompt(VIDEO_PROMPT), 1)
    assert logits.isfinite().all() and 0.1 < logits.std() < 10
    with pytest.raises(CheckpointError, match="no safetensors file"):
        load_model(directory, CPU, torch.float32)
