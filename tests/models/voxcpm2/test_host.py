"""The codec's operations and the local stacks on the CPU against their references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models.voxcpm2.model import load_model
from models.voxcpm2.stack import LocalStack
from models.voxcpm2.vae_layers import residual_unit, snake_samples, snake_upsample
from tests.models.kernels.checking import relative_error, upcast
from tests.models.voxcpm2.golden import DIRECTORY

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


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize(("make", "width", "size"), CASES)
@pytest.mark.parametrize("rows", [1, 3])
def test_equal_to_the_reference(make, width: int, size: int, rows: int, channels_last: bool) -> None:
    """Any layout in memory, with earlier samples and without; no slot but the rows' own is touched."""
    torch.manual_seed(width)
    operation, given, pad = make(width, size, channels_last)
    x = torch.randn(rows, 40, width).transpose(1, 2) if channels_last else torch.randn(rows, width, 40)
    before = x.clone()
    assert relative_error(operation(x, *given), operation.reference(*upcast(x, *given))) < FLOAT32
    table = torch.randn(rows + 3, 20 + width * pad)
    wide_table, slots = table.double(), torch.randperm(rows + 3)[:rows]
    memory, wide_memory = (t[:, 10 : 10 + width * pad].unflatten(1, (width, pad)) for t in (table, wide_table))
    out = operation(x, *given, (memory, slots))
    assert relative_error(out, operation.reference(*upcast(x, *given), (wide_memory, slots))) < FLOAT32
    assert relative_error(table, wide_table) < FLOAT32
    others = [slot for slot in range(rows + 3) if slot not in slots.tolist()]
    assert torch.equal(table[others].double(), wide_table[others])
    assert torch.equal(x, before)


@pytest.mark.parametrize("sequences", [1, 4])
def test_equal_to_a_stack_of_another_dtype(sequences: int) -> None:
    networks = [load_model(DIRECTORY, torch.device("cpu"), dtype).network for dtype in (torch.float32, torch.float64)]
    for ours, wide in zip(*(local_stacks(network) for network in networks), strict=True):
        torch.manual_seed(sequences)
        tokens = torch.randn(sequences, ours.length, ours.first_norm.weight.shape[0])
        given = tokens.clone()
        out, expected = ours(tokens), wide(tokens.double())
        assert out.shape == expected.shape == (sequences, ours.kept.stop - ours.kept.start, tokens.shape[-1])
        assert relative_error(out, expected) < FLOAT32
        assert torch.equal(tokens, given)
        # A norm that the caller has is read in place of the first block's own.
        assert torch.equal(ours(tokens, ours.first_norm(tokens)), out)
        assert not torch.allclose(ours(tokens, 2 * ours.first_norm(tokens)), out)


def local_stacks(network) -> list[LocalStack]:
    return [network.feat_encoder.encoder, network.feat_decoder.decoder]
