"""The golden prompts through the CUDA kernels and real graphs."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from models.interfaces.capturable import Bucket
from models.qwen2_5_vl.model import load_model
from tests.models.qwen2_5_vl.golden import (
    DIRECTORY,
    PROMPTS,
    VIDEO_PROMPT,
    expected,
    golden_tokens,
    item_names,
    model,
    prompt,
)
from tests.support.chat_golden import encode, generate, rounding_error
from tests.support.encoder_replay import CapturedEncoder, bytes_of_nan
from tests.support.inference import no_gradients as no_gradients

pytestmark = pytest.mark.gpu

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ITEMS = [name for name in PROMPTS if item_names(name)]
REFERENCE_FACTOR = 1.5
LARGEST: Bucket = {"patches": 512, "sequences": 16, "max_seqlen": 512, "windows": 32}
SMALLER: Bucket = {"patches": 384, "sequences": 8, "max_seqlen": 384, "windows": 16}


def forced(name: str, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Logits of the prompt, and of the reference's tokens fed one by one."""
    ids = golden_tokens(name)
    logits, steps, _ = generate(model(device, dtype), prompt(name), len(ids), forced=ids)
    return logits.cpu(), steps.cpu()


@pytest.mark.parametrize("name", PROMPTS)
def test_float32(name: str) -> None:
    logits, steps = forced(name, CUDA, torch.float32)
    torch.testing.assert_close(logits, expected()[f"prompt.{name}.logits"], atol=1e-4, rtol=0)
    torch.testing.assert_close(steps, expected()[f"prompt.{name}.generated_logits"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ITEMS)
def test_bfloat16_embeddings_are_as_close_as_their_reference(name: str) -> None:
    reference = torch.cat([expected()[f"{item}.embeds"] for item in item_names(name)])
    ours, host = (encode(model(device, torch.bfloat16).encoder, prompt(name).items, device) for device in (CUDA, CPU))
    assert rounding_error(ours, reference) <= REFERENCE_FACTOR * rounding_error(host, reference)
    assert torch.cosine_similarity(ours.float().cpu(), reference).min() > 0.999


@pytest.mark.parametrize("name", PROMPTS)
def test_bfloat16_logits_are_as_close_as_their_reference(name: str) -> None:
    ours, host = (forced(name, device, torch.bfloat16) for device in (CUDA, CPU))
    for part, mine, plain in zip(("logits", "generated_logits"), ours, host, strict=True):
        reference = expected()[f"prompt.{name}.{part}"]
        assert rounding_error(mine, reference) <= REFERENCE_FACTOR * rounding_error(plain, reference), part


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replay_equals_eager_on_a_poisoned_pool(dtype: torch.dtype) -> None:
    captured = CapturedEncoder(load_model(DIRECTORY, CUDA, dtype).encoder, [SMALLER, LARGEST], CUDA)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    mixes = [prompt(name).items for name in ITEMS]
    for rows, plain in captured.replays_on_a_poisoned_pool(mixes, partial(bytes_of_nan, captured.encoder, LARGEST)):
        assert rows.isfinite().all()
        torch.testing.assert_close(rows[: len(plain)], plain, atol=tolerance, rtol=0)


def test_the_video_prompt_decodes_on_the_device() -> None:
    _, _, ids = generate(model(CUDA, torch.float32), prompt(VIDEO_PROMPT), len(golden_tokens(VIDEO_PROMPT)))
    assert ids == golden_tokens(VIDEO_PROMPT)
