"""Captured steps of a language model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.checkpoints.published import GOLDEN
from benchmarks.steps.decoder import captured_prefill
from benchmarks.steps.full_size import load
from models.checkpoints.registry import family_of
from service.graphs.pool import GraphPool
from service.hub.catalog import embedded_models
from tests.support.inference import no_gradients as no_gradients

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


@pytest.mark.parametrize("recurrent", [False, True])
def test_a_cached_prefill_replays_what_an_eager_pass_gives(recurrent: bool) -> None:
    """The last rows of a prompt, behind the first ones."""
    tiny = next(Path(path) for path in embedded_models() if family_of(Path(path)).kind == "chat")
    decoder = load(GOLDEN / "qwen3_5" if recurrent else tiny, CPU).decoder
    runner, plan = captured_prefill("tiny", decoder, 8, GraphPool(CPU, 1 << 30), cached=64)
    replayed = runner.run(plan).outputs["hidden"].clone()
    eager = runner.run(plan, eager="disabled").outputs["hidden"]
    assert replayed.isfinite().all() and torch.equal(replayed, eager)
