"""The golden prompts through the CUDA kernels and real graphs."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from models.minicpmv.model import MiniCPMVModel, load_model
from models.protocol import Capacity, Plan
from service.graphs.accounting import Observations
from service.graphs.buffers import exact_buffers
from service.graphs.pool import GraphPool
from service.graphs.runner import GraphRunner
from tests.models.minicpmv.golden import PROMPTS, VERSIONS, directory, expectations, golden_prompt
from tests.support.chat_golden import encode, generate, largest_difference

pytestmark = pytest.mark.gpu

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TWIN_FACTOR = 1.5
LARGEST: Capacity = {"patches": 512, "sequences": 16, "groups": 16, "max_seqlen": 64, "max_group_keys": 256}
SMALLER: Capacity = {"patches": 256, "sequences": 8, "groups": 8, "max_seqlen": 64, "max_group_keys": 256}
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
def test_bfloat16_is_as_close_as_its_plain_twin(version: str, name: str) -> None:
    reference = expectations(version, name)

    def errors(device: torch.device) -> tuple[float, float]:
        return (
            error(embeds(version, name, device, torch.bfloat16), reference["slice_embeds"]),
            error(logits(version, name, device, torch.bfloat16), reference["generated_logits"]),
        )

    for ours, twin in zip(errors(CUDA), errors(CPU), strict=True):
        assert ours <= TWIN_FACTOR * twin


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("version", VERSIONS)
def test_replay_equals_eager_on_a_poisoned_pool(version: str, dtype: torch.dtype) -> None:
    """Before each replay the largest graph runs on NaN in every row, so that its intermediates fill the pool."""
    encoder = load_model(directory(version), CUDA, dtype).encoder
    encoder.tower.position_embedding.weight[UNREAD] = float("nan")
    route = GraphRunner("test", "encoder", encoder, [SMALLER, LARGEST], GraphPool(CUDA, 1 << 30), Observations())
    while route.capture_next(idle=True):
        pass
    assert route.recorded == [LARGEST, SMALLER]
    rows, slices = LARGEST["patches"], LARGEST["sequences"]
    bounds = np.linspace(0, rows, slices + 1).astype(np.int32)
    poison = Plan(
        arrays={
            "position_ids": np.full(rows, UNREAD, dtype=np.int32),
            "cu_slices": bounds,
            "cu_groups": bounds,
        },
        needs=LARGEST,
    )
    for owner, name in PROMPTS:
        if owner != version:
            continue
        items = golden_prompt(version, name).items
        assert route.run(poison).outputs["embeds"].isnan().all()
        plan = encoder.plan(items)
        run = route.run(plan)
        assert run.route == "replay"
        replayed = run.outputs["embeds"][: sum(item.num_embeds for item in items)].clone()
        buffers = exact_buffers(encoder.buffer_specs(plan.needs), plan, CUDA)
        plain = encoder.forward(buffers, plan.needs)["embeds"]
        assert torch.isfinite(replayed).all()
        tolerance = 1e-5 if dtype == torch.float32 else 0.05
        torch.testing.assert_close(replayed, plain, atol=tolerance, rtol=0)
