"""References of float64 inputs compute in float64: a kernel's error is its own."""

from __future__ import annotations

import torch

from models.layers.moe import experts_dense
from models.layers.norms import rms_norm
from models.layers.precision import upcast
from models.layers.rotary import rotate_half_split
from tests.support.rotation import rotate_interleaved

EXACT = {"rtol": 1e-13, "atol": 1e-13}


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_upcast() -> None:
    dtypes = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float64: torch.float64}
    assert {dtype: upcast(torch.ones(2, dtype=dtype)).dtype for dtype in dtypes} == dtypes


def test_norm() -> None:
    x = normal(5, 64)
    normed = rms_norm.reference(x, torch.ones(64, dtype=torch.float64), 0.0)
    torch.testing.assert_close(normed.square().mean(-1), torch.ones(5, dtype=torch.float64), **EXACT)


def test_rotation_and_back() -> None:
    x, angles = normal(3, 2, 8), normal(3, 4)
    for rotate in (rotate_half_split, rotate_interleaved):
        there = rotate(x, angles.cos(), angles.sin())
        torch.testing.assert_close(rotate(there, angles.cos(), -angles.sin()), x, **EXACT)


def test_experts() -> None:
    x, gate_up, down = normal(6, 8), normal(1, 8, 8), normal(1, 8, 4)
    chosen = torch.zeros(6, 1, dtype=torch.int64)
    gate, up = (x @ gate_up[0].T).chunk(2, dim=-1)
    expected = (gate * torch.sigmoid(gate) * up) @ down[0].T
    answer = experts_dense(x, torch.full((6, 1), 0.7, dtype=torch.float64), chosen, gate_up, down)
    torch.testing.assert_close(answer, 0.7 * expected, **EXACT)
