"""Products by tiles of rows, with everything that may stand before and behind them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from models.layers import block
from models.layers.block import BlockConfig, run_blocks
from models.layers.fused import add_rms_norm_reference as add_rms_norm
from models.layers.fused import rms_norm_reference as rms_norm
from models.layers.fused import silu_mul_reference as silu_mul
from models.layers.kernels import linear, routes
from models.layers.kernels.linear import (
    linear_add_rms_norm_cuda,
    linear_add_unscaled_cuda,
    linear_cuda,
    linear_quick_gelu_cuda,
    linear_silu_mul_cuda,
    vocabulary_tile,
)
from models.layers.kernels.routes import Tile
from models.layers.packed import linear_quick_gelu
from models.voxcpm2.stack import Stack
from tests.models.kernels.checking import relative_error, replayed, wide_in_place

EPS = 1e-5
LIMIT = 8e-3
TILES = [
    Tile(64, 64, 64, warps=4, stages=3),
    Tile(128, 64, 64, warps=4, stages=3),
    Tile(64, 32, 64, warps=4, stages=3, tma=True),
    Tile(16, 64, 64, warps=4, stages=3, swap=True),
    Tile(64, 64, 64, warps=4, stages=3, swap=True, tma=True),
]
SIZES = [(rows, TILES[0]) for rows in (1, 63, 64, 65, 128, 129, 176)]
SIZES += [(rows, tile) for tile in TILES[1:] for rows in (1, 129)]
MANY_ROWS = [(1408, TILES[1])]


class Operands:
    """x of rows that are not contiguous, weights of `2 * width` rows, all of the kind; `product` in float64."""

    def __init__(self, device: torch.device, rows: int, inputs: int = 128, width: int = 128) -> None:
        # The interpreter has no bfloat16 arithmetic of its own; float16 takes the same paths.
        kind = torch.bfloat16 if device.type == "cuda" else torch.float16

        def random(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, device=device) * scale).to(kind)

        self.x = random(rows, 2 * inputs)[:, inputs:]
        self.gate_up = random(2 * width, inputs, scale=inputs**-0.5)
        self.weight, self.bias = self.gate_up[:width], random(width)
        self.residual, self.norm = random(rows, width, scale=3.0), random(width)
        self.next = random(2 * width, width, scale=width**-0.5)
        self.gate_up_product = self.x.double() @ self.gate_up.double().T
        self.product = self.gate_up_product[:, :width] + self.bias.double()


@pytest.mark.parametrize(("rows", "tile"), SIZES + MANY_ROWS, ids=str)
def test_bias_silu_and_gelu(device: torch.device, rows: int, tile: Tile) -> None:
    given = Operands(device, rows)
    out = replayed(device, lambda: linear_cuda(given.x, given.weight, given.bias, tile))
    assert relative_error(out, given.product) < LIMIT
    out = replayed(device, lambda: linear_silu_mul_cuda(given.x, given.gate_up, tile))
    assert relative_error(out, silu_mul(given.gate_up_product)) < LIMIT
    out = replayed(device, lambda: linear_quick_gelu_cuda(given.x, given.weight, given.bias, tile))
    assert relative_error(out, given.product * torch.sigmoid(1.702 * given.product)) < LIMIT


@pytest.mark.parametrize(("rows", "tile"), SIZES, ids=str)
def test_shares_of_the_inputs_and_norm(device: torch.device, rows: int, tile: Tile) -> None:
    given = Operands(device, rows)
    normed, total = replayed(
        device,
        lambda: linear_add_rms_norm_cuda(
            given.x, given.weight, given.bias, given.residual, given.norm, EPS, split=2, tile=tile
        ),
    )
    expected = add_rms_norm(given.product, *wide_in_place(given.residual, given.norm), EPS)
    assert relative_error(normed, expected[0]) < LIMIT
    assert relative_error(total, expected[1]) < LIMIT


@pytest.mark.parametrize(("rows", "tile"), SIZES + MANY_ROWS, ids=str)
def test_norm_whose_scale_comes_after_the_next_product(device: torch.device, rows: int, tile: Tile) -> None:
    given = Operands(device, rows)

    def run() -> tuple[Tensor, ...]:
        unscaled, total = linear_add_unscaled_cuda(
            given.x, given.weight, given.bias, given.residual, given.norm, EPS, tile
        )
        width = given.weight.shape[0]
        plain = linear_cuda(unscaled, given.next[:width], given.bias, tile)
        return total, plain, linear_silu_mul_cuda(unscaled, given.next, tile), unscaled.squares

    total, plain, gated, squares = replayed(device, run)
    normed, expected = add_rms_norm(given.product, *wide_in_place(given.residual, given.norm), EPS)
    assert relative_error(total, expected) < LIMIT
    assert relative_error(squares.sum(1), expected.square().sum(1)) < LIMIT
    product = normed @ given.next.double().T
    assert relative_error(plain, product[:, : given.weight.shape[0]] + given.bias.double()) < LIMIT
    assert relative_error(gated, silu_mul(product)) < LIMIT


def test_an_odd_number_of_column_tiles(device: torch.device) -> None:
    """Squares of three tiles are read by four."""
    given = Operands(device, 70, inputs=64, width=192)
    tile = TILES[0]

    def run() -> Tensor:
        unscaled, _ = linear_add_unscaled_cuda(given.x, given.weight, None, given.residual, given.norm, EPS, tile)
        return linear_cuda(unscaled, given.next, None, tile)

    total = given.gate_up_product[:, :192] + given.residual.double()
    expected = rms_norm(total, given.norm.double(), EPS) @ given.next.double().T
    assert relative_error(replayed(device, run), expected) < LIMIT


def test_leading_dimensions_stay(device: torch.device) -> None:
    given = Operands(device, 66)
    residual = given.residual.view(6, 11, -1)
    unscaled, total = linear_add_unscaled_cuda(
        given.x.unflatten(0, (6, 11)), given.weight, None, residual, given.norm, EPS, TILES[0]
    )
    assert unscaled.rows.shape == total.shape == residual.shape
    assert linear_cuda(unscaled, given.next, None, TILES[0]).shape == (6, 11, given.next.shape[0])


def test_no_rows(device: torch.device) -> None:
    given = Operands(device, 0)
    assert linear_silu_mul_cuda(given.x, given.gate_up, TILES[0]).shape == (0, 128)


def test_tiles_must_be_whole(device: torch.device) -> None:
    given = Operands(device, 3)
    with pytest.raises(ValueError, match="128 columns of 128 inputs are not whole tiles of 64x96x64"):
        linear_cuda(given.x, given.weight, None, Tile(64, 96, 64))
    with pytest.raises(ValueError, match="split 3"):
        linear_add_rms_norm_cuda(given.x, given.weight, None, given.residual, given.norm, EPS, split=3, tile=TILES[0])


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "inputs", "inner"), [(176, 1024, 4096), (1408, 1024, 4096), (8, 1536, 8960)])
@pytest.mark.parametrize("tma", [False, True])
def test_at_size(rows: int, inputs: int, inner: int, tma: bool) -> None:
    """Gate and up, then down with its residual and norm, as a layer has them."""
    device = torch.device("cuda")
    given = Operands(device, rows, inputs, inner)
    tile = Tile(128, 64, 64, warps=8, stages=4, tma=tma) if rows > 8 else Tile(16, 64, 128, swap=True, tma=tma)
    hidden = replayed(device, lambda: linear_silu_mul_cuda(given.x, given.gate_up, tile))
    assert relative_error(hidden, silu_mul(given.gate_up_product)) < LIMIT
    shapes = ((inputs, inner), (rows, inputs), (inputs,))
    down, residual, norm = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)
    down *= inner**-0.5

    def add() -> tuple[Tensor, Tensor]:
        unscaled, total = linear_add_unscaled_cuda(hidden, down, None, residual, norm, EPS, tile)
        return linear_silu_mul_cuda(unscaled, given.gate_up, tile), total

    out, total = replayed(device, add)
    normed, expected = add_rms_norm(hidden.double() @ down.double().T, residual.double(), norm.double(), EPS)
    assert relative_error(total, expected) < LIMIT
    assert relative_error(out, silu_mul(normed @ given.gate_up.double().T)) < LIMIT


def test_the_plain_twin_of_quick_gelu() -> None:
    x, weight, bias = torch.randn(3, 8), torch.randn(5, 8), torch.randn(5)
    y = x @ weight.T + bias
    torch.testing.assert_close(linear_quick_gelu(x, weight, bias), y * torch.sigmoid(1.702 * y))


def test_blocks_whose_norms_wait(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both stacks give what they give without a table; the rows that leave have their norm at once."""
    kind = torch.bfloat16 if device.type == "cuda" else torch.float16
    stack = Stack(BlockConfig(128, 128, 2, 1, 64, EPS), 3)
    stack.to(device, kind).requires_grad_(False)
    for name, parameter in stack.named_parameters():
        if name.endswith("norm.weight"):
            parameter.copy_(torch.rand(parameter.shape) + 0.5)
    x = torch.randn(2, 11, 128, device=device).to(kind)

    def attend(q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        return q + v.mean(1, keepdim=True).repeat(1, 1, 2, 1)

    def run() -> tuple[Tensor, Tensor]:
        flat = run_blocks(stack.blocks()[:2], x.flatten(0, 1), stack.norm, lambda q, k, v, _: q)
        return stack(x, attend, slice(7, 11)), flat

    monkeypatch.setattr(routes, "ROUTES", {})
    expected = run()
    asked = 0

    def deferred(*given: Any) -> Any:
        nonlocal asked
        asked += 1
        return linear_add_unscaled_cuda(*given, TILES[0])

    monkeypatch.setattr(block, "linear_add_norm_for_product", deferred)
    for out, reference in zip(run(), expected, strict=True):
        assert out.shape == reference.shape
        assert relative_error(out, reference) < LIMIT
    assert asked == 5 + 3


@pytest.mark.parametrize("rows", [2, 16, 17, 40, 64])
def test_logits_of_few_rows(device: torch.device, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head over a vocabulary has a tile of its own; the interpreter's is a small one."""
    outputs = 1 << 16 if device.type == "cuda" else 192
    monkeypatch.setattr(linear, "_VOCABULARY", outputs)
    kind = torch.bfloat16 if device.type == "cuda" else torch.float16
    x, weight = (torch.randn(n, 128, device=device).to(kind) for n in (rows, outputs))
    tile = vocabulary_tile(x, weight)
    assert tile is not None
    assert tile.rows >= rows
    assert relative_error(linear_cuda(x, weight, None, tile), x.double() @ weight.double().T) < LIMIT
    assert vocabulary_tile(x.repeat(33, 1), weight) is None
    assert vocabulary_tile(x, weight[:-1]) is None
