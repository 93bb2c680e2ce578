"""Rooflines of prefills."""

from __future__ import annotations

import pytest

from benchmarks.roofline.decoders import full_size_prefill_floor
from benchmarks.roofline.h100 import BYTES, FLOPS


def test_a_prefills_least_time_is_its_arithmetic_or_its_experts() -> None:
    """By hand, of Qwen2-VL-2B's 28 layers and of 48 layers of 128 experts, 8 of which a token takes."""
    per_token = 28 * (2048 * 1536 + 1536 * 1536 + 3 * 8960 * 1536)
    attention = 28 * 1024**2 * 2 * 12 * 128
    expected = (2 * 1024 * per_token + attention) / FLOPS
    assert full_size_prefill_floor("qwen2_vl_2b", 1024) == pytest.approx(expected, rel=1e-6)
    experts = 48 * 3 * 768 * 2048 * 128
    others = 48 * (5120 * 2048 + 2048 * 4096 + 128 * 2048)
    read = 2 * (experts * (1 - (1 - 8 / 128) ** 384) + others) / BYTES
    assert full_size_prefill_floor("qwen3_vl_30b_a3b", 384) == pytest.approx(read, rel=1e-3)
