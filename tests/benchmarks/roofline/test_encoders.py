"""Rooflines of encoder passes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.checkpoints.published import make
from benchmarks.encoder import WORK
from benchmarks.roofline.encoders import encoder_floor
from benchmarks.roofline.gpu import FLOPS
from benchmarks.steps.encoder import audio, plans_of
from benchmarks.steps.full_size import load
from models.checkpoints.registry import family_of, resolve
from models.text.processor import ChatProcessor
from tests.support.inference import no_gradients as no_gradients

pytestmark = pytest.mark.slow


def test_the_least_time_of_half_a_minute_of_audio(tmp_path: Path) -> None:
    """GFLOP a second by hand: convolutions, conv_out, linears, attention."""
    for name, giga in (("qwen3_asr_0_6b", 4.21 + 0.18 + 4.55 + 0.087), ("qwen3_asr_1_7b", 4.21 + 0.20 + 7.93 + 0.133)):
        directory = make(name, tmp_path)
        tower = load(directory, torch.device("meta")).encoder
        (item,) = audio(30)[1](resolve(family_of(directory).processor)(directory))
        (plan,) = plans_of(tower, [item], tower.default_buckets()[-1])
        assert encoder_floor(tower, plan, 0) == pytest.approx(30 * giga * 1e9 / FLOPS, rel=1e-2)


def test_the_least_time_of_a_tower_that_merges_on_its_way(tmp_path: Path) -> None:
    """TFLOP by hand: 7 blocks on all patches, 20 on a quarter."""
    directory = make("minicpmv_4_6", tmp_path)
    processor: ChatProcessor = resolve(family_of(directory).processor)(directory)
    tower = load(directory, torch.device("meta")).encoder
    for (label, build), tera in zip(WORK["minicpmv_4_6"], (0.480, 3.33, 4.34, 30.7), strict=True):
        plans = plans_of(tower, build(processor), tower.default_buckets()[-1])
        least = sum(encoder_floor(tower, plan, 0) for plan in plans)
        assert least == pytest.approx(tera * 1e12 / FLOPS, rel=2e-3), label
