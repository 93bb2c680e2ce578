"""What the comparison of weights in e4m3 with those in float32 counts, on a golden miniature."""

from __future__ import annotations

import pytest
import torch

from benchmarks.quantization import Asked, Kept, compare
from tests.models.qwen2_vl.golden import DIRECTORY, PROMPTS, prompt
from tests.support.inference import no_gradients as no_gradients

pytestmark = pytest.mark.slow


def test_the_weights_themselves_keep_everything_and_fewer_bits_less() -> None:
    asked = [Asked(prompt(name), 4) for name in PROMPTS[:2]]
    rows = {row["variant"]: row for row in compare(DIRECTORY, asked, frozenset())}
    plain, small = rows["float32"], rows["fp8"]
    assert (plain["kl_most"], plain["same_tokens"], plain["same_answers"]) == (0, 1, 1)
    assert 0 < rows["bfloat16"]["kl_mean"] < small["kl_mean"] < 1
    assert small["decoder_bytes"] < 0.7 * plain["decoder_bytes"]
    assert small["kl_mean"] != rows["fp8, prefills in 8 bits"]["kl_mean"]
    assert all(row["tokens"] == 8 and row["right_answers"] is None for row in rows.values())


def test_divergences_and_choices_are_counted_by_token() -> None:
    kept = Kept()
    kept.divergences = [torch.tensor([0.0, 0.5]), torch.tensor([0.1])]
    kept.same_tokens = [torch.tensor([True, False]), torch.tensor([True])]
    kept.right = [True, False]
    row = kept.row()
    assert (row["answers"], row["tokens"], row["right_answers"]) == (2, 3, 0.5)
    assert row["kl_mean"] == pytest.approx(0.2) and row["same_tokens"] == pytest.approx(2 / 3)
    assert row["same_answers"] == 0.5
