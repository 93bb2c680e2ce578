"""The golden prompts through the CUDA kernels and real graphs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from models.media import Prompt
from models.protocol import Capacity
from models.qwen2_vl.model import Qwen2VL, load_model
from models.qwen2_vl.pictures import VideoLimits
from models.qwen2_vl.processor import load_processor
from service.graphs.accounting import Observations
from service.graphs.pool import GraphPool
from service.graphs.runner import GraphRunner
from tests.support.chat_golden import GOLDEN, encode, generate, golden_messages
from tests.support.prompts import prompt_of

pytestmark = pytest.mark.gpu

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DIRECTORY = GOLDEN / "qwen2_vl"
PROMPTS: dict[str, dict[str, bool]] = json.loads((DIRECTORY / "inputs.json").read_text())["prompts"]
TWIN_FACTOR = 1.5
LARGEST: Capacity = {"patches": 512, "sequences": 16, "max_seqlen": 512}
SMALLER: Capacity = {"patches": 256, "sequences": 8, "max_seqlen": 256}


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


@cache
def expected() -> dict[str, Tensor]:
    return load_file(DIRECTORY / "expected.safetensors")


@cache
def model(device: torch.device, dtype: torch.dtype) -> Qwen2VL:
    return load_model(DIRECTORY, device, dtype)


@cache
def prompt(name: str) -> Prompt:
    processor = load_processor(DIRECTORY, video_limits=VideoLimits(3136, 9408, 10**9))
    messages, items = golden_messages(processor, DIRECTORY, name)
    return prompt_of(processor, messages, items, options={"add_vision_id": PROMPTS[name]["add_vision_id"]})


def forced(name: str, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits of the prompt, and of the reference's tokens fed one by one."""
    ids = expected()[f"prompt.{name}.generated_ids"].tolist()
    logits, steps, _ = generate(model(device, dtype), prompt(name), len(ids), forced=ids)
    return logits.cpu(), steps.cpu()


@pytest.mark.parametrize("name", PROMPTS)
def test_float32(name: str) -> None:
    logits, steps = forced(name, CUDA, torch.float32)
    torch.testing.assert_close(logits, expected()[f"prompt.{name}.logits"], atol=1e-4, rtol=0)
    torch.testing.assert_close(steps, expected()[f"prompt.{name}.generated_logits"], atol=1e-4, rtol=0)


ITEMS = (
    ("images", ("image.0", "image.1", "image.2")),
    ("video", ("video.short", "image.2")),
    ("long_video", ("video.long", "image.2")),
)


def error(value: Tensor, reference: Tensor) -> float:
    return float((value.float().cpu() - reference).norm())


@pytest.mark.parametrize(("name", "items"), ITEMS)
def test_bfloat16_embeddings_are_as_close_as_their_plain_twin(name: str, items: tuple[str, ...]) -> None:
    reference = torch.cat([expected()[f"{item}.embeds"] for item in items])
    ours, twin = (
        error(encode(model(device, torch.bfloat16).encoder, prompt(name).items, device), reference)
        for device in (CUDA, CPU)
    )
    assert ours <= TWIN_FACTOR * twin


@pytest.mark.parametrize("name", PROMPTS)
def test_bfloat16_logits_are_as_close_as_their_plain_twin(name: str) -> None:
    ours, twin = (forced(name, device, torch.bfloat16) for device in (CUDA, CPU))
    for part, mine, plain in zip(("logits", "generated_logits"), ours, twin, strict=True):
        reference = expected()[f"prompt.{name}.{part}"]
        assert error(mine, reference) <= TWIN_FACTOR * error(plain, reference), part


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replay_equals_eager_on_a_poisoned_pool(dtype: torch.dtype) -> None:
    """Before each replay the largest graph runs with NaN in every row, so that its intermediates fill the pool."""
    encoder = load_model(DIRECTORY, CUDA, dtype).encoder
    route = GraphRunner("test", "encoder", encoder, [SMALLER, LARGEST], GraphPool(CUDA, 1 << 30), Observations())
    while route.capture_next(idle=True):
        pass
    assert route.recorded == [LARGEST, SMALLER]
    values = encoder.byte_values.clone()
    for name, _ in ITEMS:
        items = prompt(name).items
        plan = encoder.plan(items)
        encoder.byte_values.fill_(float("nan"))
        largest = type(plan)(plan.arrays, LARGEST, plan.tensors, plan.fills)
        assert route.run(largest).outputs["embeds"].isnan().all()
        encoder.byte_values.copy_(values)
        run = route.run(plan)
        assert run.route == "replay"
        replayed = run.outputs["embeds"][: sum(item.num_embeds for item in items)].clone()
        assert run.outputs["embeds"].isfinite().all()
        plain = encode(encoder, items, CUDA)
        torch.testing.assert_close(replayed, plain, atol=1e-5 if dtype == torch.float32 else 0.05, rtol=0)


def test_random_weights_of_full_size_are_made_on_the_device(tmp_path: Path) -> None:
    """The 2B shapes, without a file of tensors and without a copy on the host."""
    for file in ("tokenizer.json", "preprocessor_config.json", "tokenizer_config.json"):
        (tmp_path / file).write_bytes((DIRECTORY / file).read_bytes())
    config = json.loads((DIRECTORY / "config.json").read_text())
    config |= {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
    }
    config["vision_config"] |= {"depth": 32, "embed_dim": 1280, "num_heads": 16, "hidden_size": 1536}
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = load_model(tmp_path, CUDA, torch.bfloat16, "random")
    assert sum(parameter.numel() for parameter in made.parameters()) == 2_208_985_600
    logits, _, _ = generate(made, prompt("video"), 2)
    assert logits.isfinite().all()
