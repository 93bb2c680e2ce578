"""The codec's operations on the CPU against their references, in one piece and as streams."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models.voxcpm2.vae_layers import residual_unit, snake_samples, snake_upsample

FLOAT32 = 2e-6
"""Of the error relative to the whole result."""


def positive(*shape: int) -> Tensor:
    return torch.rand(*shape) * 3 + 0.2


def unit(width: int, dilation: int, _: bool) -> tuple[object, tuple[object, ...], int]:
    weights = (torch.randn(width, 1, 7), torch.randn(width), dilation)
    after = (positive(width), torch.randn(width, width, 1) * width**-0.5, torch.randn(width))
    return residual_unit, (positive(width), *weights, *after), 6 * dilation


def upsample(width: int, stride: int, innermost: bool) -> tuple[object, tuple[object, ...], int]:
    weight = torch.randn(2 * stride, 10, width) * width**-0.5
    weight = weight.permute(2, 1, 0) if innermost else weight.permute(2, 1, 0).contiguous()
    conditioned = (positive(width), torch.randn(width), positive(width))
    return snake_upsample, (*conditioned, weight, torch.randn(10), stride), 1


def samples(width: int, kernel: int, _: bool) -> tuple[object, tuple[object, ...], int]:
    return snake_samples, (positive(width), torch.randn(1, width, kernel) * width**-0.5, torch.randn(1)), kernel - 1


CASES = [(unit, 24, 9), (unit, 7, 1), (upsample, 12, 3), (upsample, 5, 1), (samples, 24, 7), (samples, 3, 2)]


def wide(values: tuple[object, ...]) -> list[object]:
    return [v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for v in values]


def error(out: Tensor, expected: Tensor) -> float:
    assert out.shape == expected.shape
    return float((out.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(("make", "width", "size"), CASES)
@pytest.mark.parametrize("rows", [1, 3])
def test_equal_to_the_reference(make, width: int, size: int, rows: int, channels_last: bool) -> None:
    """Any layout in memory, with earlier samples and without; no slot but the rows' own is touched."""
    torch.manual_seed(width)
    operation, given, pad = make(width, size, channels_last)
    x = torch.randn(rows, 40, width).transpose(1, 2) if channels_last else torch.randn(rows, width, 40)
    before = x.clone()
    assert error(operation(x, *given), operation.reference(*wide((x, *given)))) < FLOAT32
    table = torch.randn(rows + 3, 20 + width * pad)
    wide_table, slots = table.double(), torch.randperm(rows + 3)[:rows]
    memory, wide_memory = (t[:, 10 : 10 + width * pad].unflatten(1, (width, pad)) for t in (table, wide_table))
    out = operation(x, *given, (memory, slots))
    assert error(out, operation.reference(*wide((x, *given)), (wide_memory, slots))) < FLOAT32
    assert error(table, wide_table) < FLOAT32
    others = [slot for slot in range(rows + 3) if slot not in slots.tolist()]
    assert torch.equal(table[others].double(), wide_table[others])
    assert torch.equal(x, before)


@pytest.mark.parametrize(("make", "width", "size"), CASES)
def test_a_stream_equals_one_pass(make, width: int, size: int) -> None:
    """Pieces shorter than what the convolution remembers are among them."""
    torch.manual_seed(size)
    operation, given, pad = make(width, size, True)
    x, slots = torch.randn(2, width, 60), torch.tensor([2, 1])
    memory = torch.zeros(3, width, pad)
    pieces = [operation(piece, *given, (memory, slots)) for piece in x.split((1, 30, 2, 27), dim=-1)]
    assert error(torch.cat(pieces, dim=-1), operation(x, *given).double()) < FLOAT32
