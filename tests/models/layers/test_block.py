"""A stack, whose sums and norms are computed together, equals its blocks one after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models.layers.block import Block, BlockConfig, ExpertsConfig, run_blocks
from models.layers.norms import RMSNorm

WIDTH = 32
EPS = 1e-6


def attend(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
    """Of one position: what it attends to is itself."""
    return v.repeat_interleave(q.shape[-2] // v.shape[-2], dim=-2)


@pytest.mark.parametrize("levels", [0, 1, 2, 3])
@pytest.mark.parametrize("experts", [None, ExpertsConfig(4, 2, 16)], ids=["dense", "mixture"])
def test_one_position(experts: ExpertsConfig | None, levels: int) -> None:
    """Features join the output of their block: its MLP does not read them."""
    torch.manual_seed(3)
    config = BlockConfig(WIDTH, 48, 4, 2, 8, EPS, experts=experts)
    layers = [Block(config) for _ in range(3)]
    norm = RMSNorm(WIDTH, EPS)
    for parameter in (parameter for module in (*layers, norm) for parameter in module.parameters()):
        torch.nn.init.normal_(parameter, std=0.5)
    x, features = torch.randn(1, WIDTH), [torch.randn(1, WIDTH) for _ in range(levels)]
    with torch.no_grad():
        expected = x
        for index, one in enumerate(layers):
            expected = one(expected, attend, index)
            expected = expected + features[index] if index < levels else expected
        expected = norm(expected)
        torch.testing.assert_close(run_blocks(layers, x, norm, attend, features=features), expected)
