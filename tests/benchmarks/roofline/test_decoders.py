"""Rooflines of decode steps and prefills."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.checkpoints.published import make
from benchmarks.roofline.decoders import decode_floor, prefill_floor
from benchmarks.roofline.gpu import BYTES, FLOPS
from benchmarks.steps.full_size import load


def test_a_prefills_least_time_is_its_arithmetic_or_its_experts(tmp_path: Path) -> None:
    """By hand, of Qwen2-VL-2B's 28 layers and of 48 layers of 128 experts, 8 of which a token takes."""
    per_token = 28 * (2048 * 1536 + 1536 * 1536 + 3 * 8960 * 1536)
    attention = 28 * 1024**2 * 2 * 12 * 128
    dense, sparse = (
        load(make(name, tmp_path), torch.device("meta")).decoder for name in ("qwen2_vl_2b", "qwen3_vl_30b_a3b")
    )
    expected = (2 * 1024 * per_token + attention) / FLOPS
    assert prefill_floor(dense, 1024) == pytest.approx(expected, rel=1e-6)
    experts = 48 * 3 * 768 * 2048 * 128
    others = 48 * (5120 * 2048 + 2048 * 4096 + 128 * 2048)
    read = 2 * (experts * (1 - (1 - 8 / 128) ** 384) + others) / BYTES
    assert prefill_floor(sparse, 384) == pytest.approx(read, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "gigabytes", "attention", "linear"),
    [
        ("qwen3_5_4b", 8.41, (8, 4), (24, 32, 8192)),
        ("qwen3_5_27b", 51.25, (16, 4), (48, 48, 10240)),
        ("qwen3_5_35b_a3b", 5.93, (10, 2), (30, 32, 8192)),  # its routers are float32
    ],
)
def test_a_recurrent_state_is_read_and_written(
    tmp_path: Path, name: str, gigabytes: float, attention: tuple[int, int], linear: tuple[int, int, int]
) -> None:
    """attention: layers and key heads of 256. linear: layers, value heads of 128 x 128 and channels."""
    decoder = load(make(name, tmp_path), torch.device("meta")).decoder
    state = linear[0] * (linear[1] * 128 * 128 * 4 + 3 * linear[2] * 2)
    row = 512 * attention[0] * 2 * attention[1] * 256 * 2 + 2 * state
    one, two = (decode_floor(decoder, rows, 512) for rows in (1, 2))
    assert one == pytest.approx((gigabytes * 1e9 + row) / BYTES, rel=2e-3)
    if "a3b" not in name:  # where a second row needs no other experts
        assert two - one == pytest.approx(row / BYTES)
