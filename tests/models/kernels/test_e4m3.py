"""Weights in e4m3 in the GEMV and in tiles, against their dequantised values in float64."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from models.layers import gemm as gemms
from models.layers.fused import silu_mul
from models.layers.kernels import e4m3, gemm
from models.layers.kernels.gemm_types import Kind, Tile
from models.layers.kernels.gemv import gemv
from models.layers.kernels.tiled_gemm import tiled_gemm
from models.layers.norms import add_rms_norm
from models.layers.op import Op
from models.layers.quantized import QuantizedWeight, ordered
from models.layers.quantized import quantise_rows as quantise_rows_reference
from tests.models.kernels.checking import relative_error, replayed

EPS = 1e-5
LIMIT = 8e-3
TILES = [
    Tile(16, 64, 128, warps=4, stages=4, swap=True),
    Tile(64, 64, 128, warps=4, stages=4, swap=True, tma=True),
    Tile(64, 32, 256, warps=4, stages=3),
    Tile(16, 16, 256, warps=4, stages=3),
    Tile(128, 64, 128, warps=4, stages=3, swap=True),
]
SHAPES = [(2048, 1536), (1536, 1536), (1536, 8960), (4608, 3584), (3584, 18944)]
"""Outputs and inputs of Qwen2-VL-2B's and 7B's layers."""


def weight_of(device: torch.device, outputs: int, inputs: int) -> QuantizedWeight:
    """With a row of zeros and rows of very different sizes."""
    drawn = torch.randn(outputs, inputs, device=device) * inputs**-0.5
    drawn *= torch.logspace(-2, 1, outputs, device=device)[torch.randperm(outputs, device=device), None]
    drawn[outputs // 2] = 0.0
    with device:
        weight = QuantizedWeight(outputs, inputs)
    weight.rows.quantise(drawn, "drawn")
    return weight


class Operands:
    def __init__(self, device: torch.device, rows: int, inputs: int = 256, width: int = 128) -> None:
        # The interpreter has no bfloat16 arithmetic of its own; float16 takes the same paths.
        kind = torch.bfloat16 if device.type == "cuda" else torch.float16

        def random(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, device=device) * scale).to(kind)

        self.x = random(rows, 2 * inputs)[:, inputs:]
        self.gate_up, self.weight = weight_of(device, 2 * width, inputs), weight_of(device, width, inputs)
        self.bias, self.residual, self.norm = random(width), random(rows, width, scale=3.0), random(width)
        self.norm_before = random(inputs)

    def product(self, weight: QuantizedWeight) -> Tensor:
        return self.x.double() @ weight.dequantised(torch.float64).T


def test_every_value_is_widened_exactly(device: torch.device) -> None:
    """All 254 finite values times 1, one for each output; the tensor cores add zeros."""
    kind = torch.bfloat16 if device.type == "cuda" else torch.float16
    finite = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8, device=device)
    with device:
        weight = QuantizedWeight(256, 256)
    codes = torch.zeros(256, 256, dtype=torch.uint8, device=device)
    places = torch.arange(254, device=device)
    codes[places, places * 37 % 256] = finite
    weight.values.copy_(codes.view(torch.float8_e4m3fn))
    weight.scale.fill_(1.0)
    expected = finite.view(torch.float8_e4m3fn).to(torch.float64).cpu()
    ones = torch.ones(3, 256, dtype=kind, device=device)
    for out in (
        gemv(ones[:1], weight, out_dtype=torch.float32),
        *(tiled_gemm(ones, weight, None, tile) for tile in TILES),
    ):
        assert torch.equal(out[0, :254].double().cpu(), expected)


def test_gemv_of_inputs_that_are_no_whole_groups(device: torch.device) -> None:
    """The embedded chat model has 192: their halves are not interleaved, and the weight is dequantised in each step.
    Our kernel reads weights before the kernels ahead of it are done, so it read some that were not written yet: one
    step in some thousands had wrong logits."""
    given = Operands(device, 1, 192, 64)
    with pytest.raises(ValueError, match="192 inputs"):
        gemv(given.x, given.weight)
    expected = given.residual.double() + given.product(given.weight)
    with patch.object(Op, "launch", side_effect=AssertionError("a kernel of ours was launched")):
        out = replayed(device, lambda: as_on_a_gpu(gemms.gemv, given.x, given.weight, residual=given.residual))
    assert relative_error(out, expected) < LIMIT


def as_on_a_gpu(op: Any, *args: Any, **options: Any) -> Tensor:
    """An operation as it runs where its tensors are on a GPU."""
    if args[0].is_cuda:
        return op(*args, **options)
    return op.launch(*args, **options) if op._takes(*args, **options) else op.reference(*args, **options)


@pytest.mark.parametrize("rows", [1, 7, 33])
def test_padding_rows_do_not_leak(device: torch.device, rows: int) -> None:
    """Rows of NaN and infinity behind the first: a row's result is its own."""
    given = Operands(device, rows + 5)
    clean = gemms.gemm.kernel(given.x, given.weight, given.bias)[:rows]
    given.x[rows:] = torch.tensor(float("nan"))
    given.x[-1] = torch.tensor(float("inf"))
    poisoned = replayed(device, lambda: gemms.gemm.kernel(given.x, given.weight, given.bias))[:rows]
    assert torch.equal(clean, poisoned)


@pytest.mark.parametrize(("inputs", "outputs"), [(96, 64), (256, 40)])
def test_shapes_that_no_kernel_takes_are_dequantised(device: torch.device, inputs: int, outputs: int) -> None:
    given = Operands(device, 3, inputs, outputs)
    out = gemms.gemm.kernel(given.x, given.weight, given.bias)
    assert relative_error(out, given.product(given.weight) + given.bias.double()) < LIMIT


def limit_of(kind: Kind, x: torch.Tensor, weight: QuantizedWeight) -> float:
    """Of an error where activations may be rounded to e4m3 themselves."""
    way = gemm.way_of(kind, x, weight)
    eight_bit = way.kernel == "eight_bit" or (way.variant is not None and way.variant.eight_bit)
    return 4e-2 if eight_bit else LIMIT


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 8, 16, 32, 64, 128, 384])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES, ids=str)
def test_the_chosen_way_at_real_shapes(device: torch.device, rows: int, outputs: int, inputs: int) -> None:
    """Replayed, in every bucket; more rows than are streamed are rounded to e4m3 themselves."""
    given = Operands(device, rows, inputs, outputs)
    limit = limit_of("plain", given.x, given.weight)
    product = given.product(given.weight) + given.bias.double()
    out = replayed(device, lambda: gemms.gemm.kernel(given.x, given.weight, given.bias))
    assert relative_error(out, product) < limit
    eager = gemms.gemm.kernel(given.x, given.weight, given.bias)
    assert torch.equal(out, eager)
    out = replayed(device, lambda: gemms.gemm.kernel(given.x, given.gate_up, None, "silu_mul"))
    gated = silu_mul.reference(given.product(given.gate_up))
    assert relative_error(out, gated) < limit_of("silu_mul", given.x, given.gate_up)
    normed, total = replayed(
        device, lambda: gemms.gemm_add_norm.kernel(given.x, given.weight, given.bias, given.residual, given.norm, EPS)
    )
    expected = add_rms_norm.reference(product, given.residual.double(), given.norm.double(), EPS)
    limit = limit_of("add_norm", given.x, given.weight)
    assert relative_error(normed, expected[0]) < limit
    assert relative_error(total, expected[1]) < limit


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 200])
def test_rows_are_quantised_as_the_reference_does(device: torch.device, rows: int) -> None:
    if not e4m3.has_e4m3():
        pytest.skip("before compute capability 8.9 no kernel writes e4m3")
    x = torch.randn(rows, 1536, device=device, dtype=torch.bfloat16) * 50
    x[1:2] = 0.0
    values, scale = replayed(device, lambda: e4m3.quantise_rows(x))
    expected, factors = quantise_rows_reference(x)
    assert torch.allclose(scale[:, 0], factors, rtol=1e-6, atol=0.0)
    given = ordered(values).float() * scale
    # A division and a multiplication by the inverse fall on both sides of a tie at times.
    assert (given - ordered(expected).float() * factors[:, None]).abs().max() <= scale.max() * 32
    assert relative_error(given, x) < 3e-2
    assert (given[1:2] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [65, 128, 300])
@pytest.mark.parametrize("tile", [Tile(64, 64, 128, 4, 4, tma=True), Tile(128, 128, 128, 8, 3, tma=True)], ids=str)
def test_eight_bits_on_both_sides(device: torch.device, rows: int, tile: Tile) -> None:
    if not e4m3.has_e4m3():
        pytest.skip("tensor cores multiply e4m3 from compute capability 8.9 on")
    given = Operands(device, rows, 1536, 512)
    values, scale = e4m3.quantise_rows(given.x)
    x = ordered(values).double() * scale.double()
    expected = x @ given.weight.dequantised(torch.float64).T + given.bias.double()
    for out in (
        replayed(device, lambda: tiled_gemm(given.x, given.weight, given.bias, tile, eight_bit=True)),
        replayed(device, lambda: e4m3.eight_bit_gemm(given.x, given.weight, given.bias)),
    ):
        assert relative_error(out, expected) < LIMIT


def test_many_rows_read_the_copy_where_one_is_kept(device: torch.device) -> None:
    """The copy here is of other values, so that it shows which of both was read."""
    given = Operands(device, 8)
    other = torch.randn(given.weight.shape, device=device).to(given.x.dtype)
    given.weight.copy, given.weight.copy_from = torch.nn.Parameter(other, requires_grad=False), 8
    copied = given.x.double() @ other.double().T
    after = given.residual, given.norm, EPS
    for x, expected in ((given.x, copied), (given.x[:7], given.product(given.weight)[:7])):
        rows = len(x)
        assert relative_error(gemm.gemm(x, given.weight), expected) < LIMIT
        for deferrable in (False, True):
            residual = given.residual[:rows]
            _, total = gemm.gemm_add_norm(x, given.weight, None, residual, *after[1:], deferrable=deferrable)
            assert relative_error(total, expected + given.residual[:rows].double()) < LIMIT
