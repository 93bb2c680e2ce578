"""The golden prompts through the CUDA kernels and real graphs; the full size with random weights."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from models.kimi_vl.model import load_model
from models.protocol import Capacity, Plan
from service.graphs.accounting import Observations
from service.graphs.buffers import exact_buffers
from service.graphs.pool import GraphPool
from service.graphs.runner import GraphRunner
from tests.models.kimi_vl.golden import (
    DIRECTORY,
    PROMPTS,
    PUBLISHED_VISION,
    TOKENS,
    expected,
    golden_tokens,
    item,
    model,
    prompt,
    write_config,
)
from tests.support.chat_golden import encode, generate, largest_difference

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
TWIN_FACTOR = 1.5
LARGEST: Capacity = {"patches": 512, "sequences": 16, "max_seqlen": 512}
SMALLER: Capacity = {"patches": 256, "sequences": 8, "max_seqlen": 256}
PICTURES = {"single": (0,), "multi": (1, 2, 3)}


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.inference_mode():
        yield


def forced(name: str, device: str, dtype: torch.dtype) -> Tensor:
    """Logits of every reference token, teacher-forced."""
    return generate(model(device, dtype), prompt(name), TOKENS, forced=golden_tokens(name))[1].cpu()


def embeds(name: str, device: str, dtype: torch.dtype) -> Tensor:
    return encode(model(device, dtype).encoder, prompt(name).items, torch.device(device)).float().cpu()


def golden_embeds(name: str) -> Tensor:
    return torch.cat([expected()[f"image.{index}.embeds"] for index in PICTURES[name]])


@pytest.mark.parametrize("name", PROMPTS)
def test_float32(name: str) -> None:
    assert (
        largest_difference(forced(name, "cuda", torch.float32), expected()[f"prompt.{name}.generated_logits"]) <= 1e-4
    )
    if name in PICTURES:
        assert largest_difference(embeds(name, "cuda", torch.float32), golden_embeds(name)) <= 2e-5


@pytest.mark.parametrize("name", PICTURES)
def test_bfloat16_embeddings_are_as_close_as_their_plain_twin(name: str) -> None:
    ours, twin = ((embeds(name, device, torch.bfloat16) - golden_embeds(name)).norm() for device in ("cuda", "cpu"))
    assert ours <= TWIN_FACTOR * twin


@pytest.mark.parametrize("name", PROMPTS)
def test_bfloat16_logits_are_as_close_as_their_plain_twin(name: str) -> None:
    """Experts run grouped here and one by one there.

    The middle one of all tokens counts: where two experts score nearly the same, rounding decides which is taken, and
    that token's logits move by more than all other rounding together.
    """
    reference = expected()[f"prompt.{name}.generated_logits"]
    ours, twin = (
        (forced(name, device, torch.bfloat16) - reference).norm(dim=-1).median() for device in ("cuda", "cpu")
    )
    assert ours <= TWIN_FACTOR * twin


def recorded(encoder: torch.nn.Module, ladder: list[Capacity]) -> GraphRunner:
    route = GraphRunner("test", "encoder", encoder, ladder, GraphPool(CUDA, 4 << 30), Observations())  # type: ignore[arg-type]
    while route.capture_next(idle=True):
        pass
    assert route.recorded == ladder[::-1]
    return route


def poison(capacity: Capacity) -> Plan:
    """NaN positions in every row of full pictures, so that every intermediate of the recording is NaN."""
    rows, sequences = capacity["patches"], capacity["sequences"]
    return Plan(
        arrays={
            "cu_seqlens": np.linspace(0, rows, sequences + 1).astype(np.int32),
            "merge_index": np.arange(rows, dtype=np.int64),
        },
        fills={"positions": float("nan")},
        needs=capacity,
    )


MIXES = {
    "mixed sizes": [item([(4, 6)]), item([(8, 2), (6, 6)], 1), item([(2, 2)], 2)],
    "one fills the budget": [item([(16, 16)], 3)],
    "a strip": [item([(2, 128)], 4)],
    "most pictures": [item([(4, 2)], seed) for seed in range(8)],
    "fills the largest": [item([(32, 16)], 5)],
    "most frames": [item([(2, 4)] * 16, 6)],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_replay_equals_eager_on_a_poisoned_pool(dtype: torch.dtype) -> None:
    """Before each replay the largest graph runs on NaN in every row, so that its intermediates fill the pool."""
    encoder = model("cuda", dtype).encoder
    route = recorded(encoder, [SMALLER, LARGEST])
    for name, items in MIXES.items():
        assert route.run(poison(LARGEST)).outputs["embeds"].isnan().all()
        plan = encoder.plan(items)
        run = route.run(plan)
        assert run.route == "replay", name
        replayed = run.outputs["embeds"][: sum(one.num_embeds for one in items)].clone()
        plain = encoder.forward(exact_buffers(encoder.buffer_specs(plan.needs), plan, CUDA), plan.needs)["embeds"]
        assert torch.isfinite(run.outputs["embeds"]).all(), name
        torch.testing.assert_close(replayed, plain, atol=2e-5 if dtype == torch.float32 else 0.05, rtol=0)


def test_one_picture_of_thinking_2506_fills_the_largest_recording(tmp_path: Path) -> None:
    """Two blocks of the published tower width: 17856 patches, the most that padding makes of the limit of 16384.

    A largest sequence length that is baked too small would leave the last rows unwritten.
    """
    for file in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copy(DIRECTORY / file, tmp_path)
    write_config(tmp_path, vision=PUBLISHED_VISION | {"num_hidden_layers": 2}, limit=16384)
    encoder = load_model(tmp_path, CUDA, torch.bfloat16, "random").encoder
    largest = encoder.default_ladder()[-1]
    route = recorded(encoder, [largest])
    for picture in (item([(36, 496)]), item([(128, 128)], 1)):
        assert route.run(poison(largest)).outputs["embeds"].isnan().all()
        run = route.run(encoder.plan([picture]))
        assert run.route == "replay"
        replayed = run.outputs["embeds"][: picture.num_embeds].float()
        plan = encoder.plan([picture])
        buffers = exact_buffers(encoder.buffer_specs(plan.needs), plan, CUDA)
        plain = encoder.forward(buffers, plan.needs)["embeds"].float()
        assert torch.isfinite(replayed).all()
        cosine = torch.nn.functional.cosine_similarity(replayed, plain, dim=-1)
        assert float(cosine.min()) > 0.999
        assert float(cosine[-1]) > 0.999


def test_full_tower_in_bfloat16_follows_float32(tmp_path: Path) -> None:
    """Four blocks of the published width, on pictures of usual sizes."""
    write_config(tmp_path, vision=PUBLISHED_VISION | {"num_hidden_layers": 4}, limit=4096)
    exact = load_model(tmp_path, CUDA, torch.float32, "random").encoder
    rounded = load_model(tmp_path, CUDA, torch.bfloat16, "random").encoder
    with torch.no_grad():
        for ours, reference in zip(rounded.parameters(), exact.parameters(), strict=True):
            ours.copy_(reference)
    items = [item([(16, 16)]), item([(46, 36)], 1)]
    wide, narrow = (encode(encoder, items, CUDA).float() for encoder in (exact, rounded))
    assert float(torch.nn.functional.cosine_similarity(wide, narrow, dim=-1).min()) > 0.999
