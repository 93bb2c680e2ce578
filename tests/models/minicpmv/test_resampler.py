"""The resampler against the published code, and ids of positions."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.checkpoints.checkpoint import fill_random
from models.interfaces.errors import CheckpointError
from models.minicpmv.resampler import Resampler
from tests.support.inference import no_gradients as no_gradients

QUERIES, PATCHES = 5, 12


@pytest.mark.parametrize(("hidden_size", "heads"), [(128, 1), (192, 1), (300, 2), (384, 3)])
def test_a_head_has_at_least_128_values(hidden_size: int, heads: int) -> None:
    resampler = Resampler(24, hidden_size, QUERIES, temporal=False)
    fill_random(resampler, 0)
    resampler.prepare()
    patches, coordinates = torch.randn(PATCHES, 24), torch.randint(9, (PATCHES, 2))
    found = resampler(patches, coordinates, torch.tensor([0, PATCHES], dtype=torch.int32))
    torch.testing.assert_close(found, published(resampler, patches, coordinates, heads), atol=1e-5, rtol=0)


def published(resampler: Resampler, patches: Tensor, coordinates: Tensor, heads: int) -> Tensor:
    values = resampler.kv_norm(resampler.kv_proj(patches))
    keys = values + resampler.side_table[coordinates].flatten(1)
    attended, _ = F.multi_head_attention_forward(
        resampler.query_norm(resampler.query),
        keys,
        values,
        resampler.hidden_size,
        heads,
        resampler.in_proj.weight,
        resampler.in_proj.bias,
        None,
        None,
        False,
        0.0,
        resampler.out_proj.weight,
        resampler.out_proj.bias,
        training=False,
    )
    return resampler.final_norm(attended) @ resampler.proj


@pytest.mark.parametrize("hidden_size", [64, 257, 390])
def test_widths_that_heads_cannot_share_are_refused(hidden_size: int) -> None:
    with pytest.raises(CheckpointError, match=f"hidden_size {hidden_size}: the resampler needs a multiple of 4"):
        Resampler(24, hidden_size, QUERIES, temporal=False)
