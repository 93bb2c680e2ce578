"""Qwen2-VL against the golden directory, through the production loaders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.errors import CheckpointError
from models.media import MediaItem, Prompt
from models.qwen2_vl.model import Qwen2VL, load_model
from models.qwen2_vl.pictures import VideoLimits
from models.qwen2_vl.processor import Qwen2VLProcessor, load_processor
from tests.support.chat_golden import (
    GOLDEN,
    encode,
    fill,
    generate,
    golden_messages,
    golden_video,
    largest_difference,
)
from tests.support.paged import PagedCache
from tests.support.prompts import prompt_of

DIRECTORY = GOLDEN / "qwen2_vl"
EXPECTED = load_file(DIRECTORY / "expected.safetensors")
INPUTS = json.loads((DIRECTORY / "inputs.json").read_text())
CPU = torch.device("cpu")
PROMPTS = tuple(INPUTS["prompts"])
ITEMS = ("image.0", "image.1", "image.2", "video.short", "video.long")


@pytest.fixture(scope="module")
def processor() -> Qwen2VLProcessor:
    # The reference patched the frames at their own size, inside the limits of pictures.
    return load_processor(DIRECTORY, video_limits=VideoLimits(3136, 9408, 10**9))


@pytest.fixture(scope="module")
def model() -> Qwen2VL:
    return load_model(DIRECTORY, CPU, torch.float32)


@pytest.fixture(scope="module")
def items(processor: Qwen2VLProcessor) -> dict[str, MediaItem]:
    pictures = {
        f"image.{i}": processor.image(Image.open(DIRECTORY / f"images/image{i}.png").convert("RGB")) for i in range(3)
    }
    counts = {"short": 3, "long": 8}
    videos = {
        f"video.{name}": processor.video(
            golden_video(DIRECTORY, [f"images/{name}_video_{i}.png" for i in range(count)])
        )
        for name, count in counts.items()
    }
    return {**pictures, **videos}


def named_prompt(processor: Qwen2VLProcessor, name: str) -> Prompt:
    messages, items = golden_messages(processor, DIRECTORY, name)
    return prompt_of(processor, messages, items, options={"add_vision_id": INPUTS["prompts"][name]["add_vision_id"]})


@pytest.mark.parametrize("name", ITEMS)
def test_preprocessing_is_exact(items: dict[str, MediaItem], model: Qwen2VL, name: str) -> None:
    item = items[name]
    assert [item.arrays["grid_thw"].tolist()] == EXPECTED[f"{name}.grid_thw"].tolist()
    rows = model.encoder.patchify(item, CPU)
    assert torch.equal(model.encoder.byte_values.view(3, 256), EXPECTED["norm_table"])
    if f"{name}.pixel_u8" in EXPECTED:
        assert torch.equal(rows, EXPECTED[f"{name}.pixel_u8"])
    if f"{name}.pixel_values" in EXPECTED:
        assert torch.equal(model.encoder.normalise(rows), EXPECTED[f"{name}.pixel_values"])


@pytest.mark.parametrize("name", ITEMS)
def test_embeddings(items: dict[str, MediaItem], model: Qwen2VL, name: str) -> None:
    assert largest_difference(encode(model.encoder, [items[name]], CPU), EXPECTED[f"{name}.embeds"]) <= 2e-5


@pytest.mark.parametrize("spare", [0, 4, 60])
def test_all_items_share_a_padded_call(items: dict[str, MediaItem], model: Qwen2VL, spare: int) -> None:
    plan = model.encoder.plan(list(items.values()))
    patches = plan.needs["patches"] + spare
    capacity = {"patches": patches, "sequences": plan.needs["sequences"] + spare // 4, "max_seqlen": patches}
    buffers = fill(model.encoder.buffer_specs(capacity), plan, CPU)
    buffers["pixels"][plan.needs["patches"] :] = 255
    buffers["coordinates"][plan.needs["patches"] :] = 10_000
    embeds = model.encoder.forward(buffers, capacity)["embeds"]
    assert embeds.isfinite().all() and embeds.shape[0] == patches // 4
    expected = torch.cat([EXPECTED[f"{name}.embeds"] for name in ITEMS])
    assert largest_difference(embeds[: len(expected)], expected) <= 2e-5


def test_a_video_is_encoded_in_parts_of_whole_frame_pairs(items: dict[str, MediaItem], model: Qwen2VL) -> None:
    for name, limit_pairs in (("video.long", 3), ("video.short", 1)):
        item = items[name]
        patches = limit_pairs * item.num_patches // item.num_sequences
        parts = model.encoder.split(item, {"patches": patches + 3, "sequences": 9, "max_seqlen": patches + 3})
        assert [part.num_sequences for part in parts] == {"video.long": [3, 1], "video.short": [1, 1]}[name]
        assert len({part.digest for part in (*parts, item)}) == len(parts) + 1
        pieces = torch.cat([encode(model.encoder, [part], CPU) for part in parts])
        assert largest_difference(pieces, EXPECTED[f"{name}.embeds"]) <= 2e-5
    assert model.encoder.split(items["image.0"], {"patches": 4, "sequences": 1, "max_seqlen": 4}) == [items["image.0"]]
    for_sequences = model.encoder.split(items["video.long"], {"patches": 999, "sequences": 2, "max_seqlen": 999})
    assert [part.num_sequences for part in for_sequences] == [2, 2]


@pytest.mark.parametrize("name", PROMPTS)
def test_ids_and_positions_are_exact(processor: Qwen2VLProcessor, name: str) -> None:
    prompt = named_prompt(processor, name)
    assert prompt.token_ids.tolist() == EXPECTED[f"prompt.{name}.input_ids"].tolist()
    assert prompt.positions.tolist() == EXPECTED[f"prompt.{name}.position_ids"].tolist()
    delta = prompt.next_position - len(prompt.token_ids)
    assert delta == EXPECTED[f"prompt.{name}.rope_delta"].item()


@pytest.mark.parametrize("chunk", [None, 17])
@pytest.mark.parametrize("name", PROMPTS)
def test_logits_and_greedy_tokens(processor: Qwen2VLProcessor, model: Qwen2VL, name: str, chunk: int | None) -> None:
    logits, steps, ids = generate(model, named_prompt(processor, name), 16, chunk=chunk)
    assert largest_difference(logits, EXPECTED[f"prompt.{name}.logits"]) <= 1e-4
    assert ids == EXPECTED[f"prompt.{name}.generated_ids"].tolist()
    assert largest_difference(steps, EXPECTED[f"prompt.{name}.generated_logits"]) <= 1e-4


def prompt_rows(model: Qwen2VL, prompt: Prompt) -> Tensor:
    """Embeddings of a prompt, vision rows in place."""
    hidden = model.decoder.embed(torch.from_numpy(prompt.token_ids).long())
    for span in prompt.spans:
        hidden[span.start : span.start + span.length] = encode(model.encoder, [prompt.items[span.item]], CPU)
    return hidden


def test_all_prompts_in_company(processor: Qwen2VLProcessor, model: Qwen2VL) -> None:
    """Prompts arrive one after the other; chunks of the newcomers share each batch with the decode rows."""
    decoder = model.decoder
    prompts = {name: named_prompt(processor, name) for name in PROMPTS}
    hidden = {name: prompt_rows(model, prompt) for name, prompt in prompts.items()}
    cache = PagedCache(decoder.cache_specs(), num_pages=80, page_size=8)
    sequences = {name: cache.new_sequence(len(prompts[name].token_ids) + 16) for name in PROMPTS}
    generated: dict[str, list[int]] = {name: [] for name in PROMPTS}
    arrived: list[str] = []
    for step in range(40):
        arrived = list(PROMPTS[: step // 3 + 1])
        decodes = [name for name in arrived if 0 < len(generated[name]) < 16]
        prefills = {
            name: min(50, len(prompts[name].token_ids) - sequences[name].length)
            for name in arrived
            if not generated[name]
        }
        if not decodes and not prefills:
            break
        rows, positions = [], []
        for name in decodes:
            rows.append(decoder.embed(torch.tensor(generated[name][-1:])))
            step_position = prompts[name].next_position + len(generated[name]) - 1
            positions.append(torch.full((3, 1), step_position))
        for name, count in prefills.items():
            chunk = slice(sequences[name].length, sequences[name].length + count)
            rows.append(hidden[name][chunk])
            positions.append(torch.from_numpy(prompts[name].positions[:, chunk]))
        batch = cache.batch(
            [sequences[name] for name in decodes], [(sequences[name], count) for name, count in prefills.items()]
        )
        out = decoder.logits(decoder.forward(torch.cat(rows), torch.cat(positions, dim=1), batch))
        for name, logits in zip((*decodes, *prefills), out.split([len(row) for row in rows]), strict=True):
            if sequences[name].length >= len(prompts[name].token_ids):
                generated[name].append(int(logits[-1].argmax()))
    for name in PROMPTS:
        assert generated[name] == EXPECTED[f"prompt.{name}.generated_ids"].tolist(), name


def copy_checkpoint(target: Path) -> Path:
    shutil.copytree(DIRECTORY, target, ignore=shutil.ignore_patterns("images", "expected.safetensors"))
    return target


def check_like_golden(directory: Path) -> None:
    processor = load_processor(directory, video_limits=VideoLimits(3136, 9408, 10**9))
    model = load_model(directory, CPU, torch.float32)
    messages, items = golden_messages(processor, DIRECTORY, "video")
    logits, _, _ = generate(model, prompt_of(processor, messages, items), 1)
    assert largest_difference(logits, EXPECTED["prompt.video.logits"]) <= 1e-4


def test_what_transformers_5_saves_loads(tmp_path: Path) -> None:
    from transformers import Qwen2VLForConditionalGeneration

    directory = copy_checkpoint(tmp_path / "saved")
    reference = Qwen2VLForConditionalGeneration.from_pretrained(DIRECTORY, dtype=torch.float32)
    reference.save_pretrained(directory, max_shard_size="200KB")
    (directory / "model.safetensors").unlink()
    assert "text_config" in json.loads((directory / "config.json").read_text())
    assert len(list(directory.glob("*.safetensors"))) > 1
    check_like_golden(directory)


def test_names_in_memory_of_transformers_5_load(tmp_path: Path) -> None:
    directory = copy_checkpoint(tmp_path / "renamed")
    tensors = load_file(directory / "model.safetensors")
    renamed = {
        f"model.{name}" if name.startswith("visual.") else name.replace("model.", "model.language_model.", 1): value
        for name, value in tensors.items()
    }
    save_file(renamed, directory / "model.safetensors")
    check_like_golden(directory)


def test_size_fields_of_a_newer_preprocessor_config_load(tmp_path: Path) -> None:
    directory = copy_checkpoint(tmp_path / "sized")
    settings = json.loads((directory / "preprocessor_config.json").read_text())
    settings["size"] = {"shortest_edge": settings.pop("min_pixels"), "longest_edge": settings.pop("max_pixels")}
    (directory / "preprocessor_config.json").unlink()
    (directory / "processor_config.json").write_text(json.dumps({"image_processor": settings}))
    check_like_golden(directory)


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("config.json", {"vision_config": None}, "'vision_config' is missing"),
        ("config.json", {"image_token_id": 4000}, "image_token_id"),
        ("config.json", {"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ("preprocessor_config.json", {"min_pixels": None}, "'shortest_edge' is missing"),
        ("preprocessor_config.json", {"merge_size": 4}, "merge_size is 4, config.json says 2"),
    ],
)
def test_configs_that_do_not_fit_are_refused(
    tmp_path: Path, file: str, change: dict[str, object], message: str
) -> None:
    directory = copy_checkpoint(tmp_path / "broken")
    content = {**json.loads((directory / file).read_text()), **change}
    content = {key: value for key, value in content.items() if value is not None}
    (directory / file).write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=message):
        load_processor(directory)


def test_random_weights_need_no_tensor_file(tmp_path: Path, processor: Qwen2VLProcessor) -> None:
    directory = copy_checkpoint(tmp_path / "random")
    (directory / "model.safetensors").unlink()
    logits, _, _ = generate(load_model(directory, CPU, torch.float32, "random"), named_prompt(processor, "video"), 1)
    assert logits.isfinite().all() and 0.1 < logits.std() < 10
    with pytest.raises(CheckpointError, match="no safetensors file"):
        load_model(directory, CPU, torch.float32)
