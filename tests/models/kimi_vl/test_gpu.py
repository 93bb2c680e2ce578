"""The golden prompts through the CUDA kernels and real graphs; the full size with random weights."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from models.interfaces.capturable import Bucket, Plan
from models.kimi_vl.model import load_model
from tests.models.kimi_vl.golden import (
    DIRECTORY,
    PROMPTS,
    PUBLISHED_VISION,
    TOKENS,
    expected,
    golden_tokens,
    item,
    model,
    pictures_of,
    prompt,
    write_config,
)
from tests.support.chat_golden import encode, generate, largest_difference
from tests.support.encoder_replay import CapturedEncoder
from tests.support.inference import no_gradients as no_gradients

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
POOL_BYTES = 4 << 30
REFERENCE_FACTOR = 1.5
LARGEST: Bucket = {"patches": 512, "sequences": 16, "max_seqlen": 512}
SMALLER: Bucket = {"patches": 256, "sequences": 8, "max_seqlen": 256}
PICTURES = [name for name in PROMPTS if pictures_of(name)]


def forced(name: str, device: str, dtype: torch.dtype) -> Tensor:
    """Logits of every reference token, teacher-forced."""
    return generate(model(device, dtype), prompt(name), TOKENS, forced=golden_tokens(name))[1].cpu()


def embeds(name: str, device: str, dtype: torch.dtype) -> Tensor:
    return encode(model(device, dtype).encoder, prompt(name).items, torch.device(device)).float().cpu()


def golden_embeds(name: str) -> Tensor:
    return torch.cat([expected()[f"{picture}.embeds"] for picture in pictures_of(name)])


@pytest.mark.parametrize("name", PROMPTS)
def test_float32(name: str) -> None:
    assert (
        largest_difference(forced(name, "cuda", torch.float32), expected()[f"prompt.{name}.generated_logits"]) <= 1e-4
    )
    if name in PICTURES:
        assert largest_difference(embeds(name, "cuda", torch.float32), golden_embeds(name)) <= 2e-5


@pytest.mark.parametrize("name", PICTURES)
def test_bfloat16_embeddings_are_as_close_as_their_reference(name: str) -> None:
    ours, host = ((embeds(name, device, torch.bfloat16) - golden_embeds(name)).norm() for device in ("cuda", "cpu"))
    assert ours <= REFERENCE_FACTOR * host


@pytest.mark.parametrize("name", PROMPTS)
def test_bfloat16_logits_are_as_close_as_their_reference(name: str) -> None:
    """Experts run grouped here and one by one there.

    The middle one of all tokens counts: where two experts score nearly the same, rounding decides which is taken, and
    that token's logits move by more than all other rounding together.
    """
    reference = expected()[f"prompt.{name}.generated_logits"]
    ours, host = (
        (forced(name, device, torch.bfloat16) - reference).norm(dim=-1).median() for device in ("cuda", "cpu")
    )
    assert ours <= REFERENCE_FACTOR * host


def poison(bucket: Bucket) -> Plan:
    """NaN positions in every row of full pictures, so that every intermediate of the captured graph is NaN."""
    rows, sequences = bucket["patches"], bucket["sequences"]
    return Plan(
        arrays={
            "cu_seqlens": np.linspace(0, rows, sequences + 1).astype(np.int32),
            "merge_index": np.arange(rows, dtype=np.int64),
        },
        fills={"positions": float("nan")},
        required=bucket,
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
    captured = CapturedEncoder(model("cuda", dtype).encoder, [SMALLER, LARGEST], CUDA, POOL_BYTES)
    tolerance = 2e-5 if dtype == torch.float32 else 0.05
    replays = captured.replays_on_a_poisoned_pool(MIXES.values(), lambda _: nullcontext(poison(LARGEST)))
    for name, (rows, plain) in zip(MIXES, replays, strict=True):
        assert rows.isfinite().all(), name
        torch.testing.assert_close(rows[: len(plain)], plain, atol=tolerance, rtol=0)


def test_one_picture_of_thinking_2506_fills_the_largest_captured_graph(tmp_path: Path) -> None:
    """Two blocks of the published tower width: 17856 patches, the most that padding makes of the limit of 16384.

    A largest sequence length that is baked too small would leave the last rows unwritten.
    """
    for file in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copy(DIRECTORY / file, tmp_path)
    write_config(tmp_path, vision=PUBLISHED_VISION | {"num_hidden_layers": 2}, limit=16384)
    encoder = load_model(tmp_path, CUDA, torch.bfloat16, "random").encoder
    largest = encoder.default_buckets()[-1]
    captured = CapturedEncoder(encoder, [largest], CUDA, POOL_BYTES)
    mixes = [item([(36, 496)])], [item([(128, 128)], 1)]
    for rows, plain in captured.replays_on_a_poisoned_pool(mixes, lambda _: nullcontext(poison(largest))):
        replayed = rows[: len(plain)].float()
        assert torch.isfinite(replayed).all()
        cosine = torch.nn.functional.cosine_similarity(replayed, plain.float(), dim=-1)
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
    upcast, narrow = (encode(encoder, items, CUDA).float() for encoder in (exact, rounded))
    assert float(torch.nn.functional.cosine_similarity(upcast, narrow, dim=-1).min()) > 0.999
