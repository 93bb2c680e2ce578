"""The golden prompts through the CUDA kernels and real graphs."""

from __future__ import annotations

from contextlib import nullcontext
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from models.interfaces.capturable import Bucket, Plan
from models.minicpmv.model import MiniCPMVModel, load_model
from tests.models.minicpmv.golden import PROMPTS, VERSIONS, directory, expectations, golden_prompt
from tests.support.chat_golden import encode, generate, largest_difference
from tests.support.encoder_replay import CapturedEncoder

pytestmark = pytest.mark.gpu

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
REFERENCE_FACTOR = 1.5
LARGEST: Bucket = {"patches": 512, "sequences": 16, "groups": 16, "max_seqlen": 64, "max_group_keys": 256}
SMALLER: Bucket = {"patches": 256, "sequences": 8, "groups": 8, "max_seqlen": 64, "max_group_keys": 256}
UNREAD = 70 * 70 - 1


@cache
def model(version: str, device: torch.device, dtype: torch.dtype) -> MiniCPMVModel:
    return load_model(directory(version), device, dtype)


def logits(version: str, name: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Of every reference token, teacher-forced."""
    generated = expectations(version, name)["generated_ids"].tolist()
    prompt = golden_prompt(version, name)
    return generate(model(version, device, dtype), prompt, len(generated), forced=generated)[1]


def embeds(version: str, name: str, device: torch.device, dtype: torch.dtype) -> Tensor:
    return encode(model(version, device, dtype).encoder, golden_prompt(version, name).items, device)


def error(value: Tensor, reference: np.ndarray) -> float:
    return float((value.float().cpu().flatten() - torch.from_numpy(reference).flatten()).norm())


@pytest.mark.parametrize(("version", "name"), PROMPTS)
def test_float32(version: str, name: str) -> None:
    reference = expectations(version, name)
    rows = embeds(version, name, CUDA, torch.float32)
    assert largest_difference(rows, reference["slice_embeds"].reshape(rows.shape)) <= 3e-5
    assert largest_difference(logits(version, name, CUDA, torch.float32), reference["generated_logits"]) <= 1e-4


@pytest.mark.parametrize(("version", "name"), PROMPTS)
def test_bfloat16_is_as_close_as_its_reference(version: str, name: str) -> None:
    reference = expectations(version, name)

    def errors(device: torch.device) -> tuple[float, float]:
        return (
            error(embeds(version, name, device, torch.bfloat16), reference["slice_embeds"]),
            error(logits(version, name, device, torch.bfloat16), reference["generated_logits"]),
        )

    for ours, host in zip(errors(CUDA), errors(CPU), strict=True):
        assert ours <= REFERENCE_FACTOR * host


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("version", VERSIONS)
def test_replay_equals_eager_on_a_poisoned_pool(version: str, dtype: torch.dtype) -> None:
    encoder = load_model(directory(version), CUDA, dtype).encoder
    encoder.tower.position_embedding.weight[UNREAD] = float("nan")
    captured = CapturedEncoder(encoder, [SMALLER, LARGEST], CUDA)
    rows, slices = LARGEST["patches"], LARGEST["sequences"]
    bounds = np.linspace(0, rows, slices + 1).astype(np.int32)
    poison = Plan(
        arrays={
            "position_ids": np.full(rows, UNREAD, dtype=np.int32),
            "cu_slices": bounds,
            "cu_groups": bounds,
        },
        required=LARGEST,
    )
    mixes = [golden_prompt(version, name).items for owner, name in PROMPTS if owner == version]
    for rows, plain in captured.replays_on_a_poisoned_pool(mixes, lambda _: nullcontext(poison)):
        assert torch.isfinite(rows[: len(plain)]).all()
        tolerance = 1e-5 if dtype == torch.float32 else 0.05
        torch.testing.assert_close(rows[: len(plain)], plain, atol=tolerance, rtol=0)
