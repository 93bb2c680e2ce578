"""Products by tiles of rows, with everything that may stand before and behind them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from models.layers import block
from models.layers.block import BlockConfig, run_blocks
from models.layers.fused import silu_mul
from models.layers.kernels import gemm, gemm_configs, persistent_gemm
from models.layers.kernels.gemm_types import Tile
from models.layers.kernels.gpu import INTERPRETER, Gpu
from models.layers.kernels.tiled_gemm import gemm_add_deferred_norm, split_gemm_add_norm, tiled_gemm
from models.layers.norms import VectorNorm, add_rms_norm, rms_norm
from models.voxcpm2.stack import Stack
from tests.models.kernels.checking import relative_error, replayed, sixteen_bits, wide_in_place
from tests.support.slow import slow

EPS = 1e-5
LIMIT = 8e-3
TILES = [
    Tile(64, 64, 64, warps=4, stages=3),
    Tile(128, 64, 64, warps=4, stages=3),
    Tile(64, 32, 64, warps=4, stages=3, tma=True),
    Tile(16, 64, 64, warps=4, stages=3, swap=True),
    Tile(64, 64, 64, warps=4, stages=3, swap=True, tma=True),
]
SIZES = [(65, TILES[0]), (129, TILES[2]), (129, TILES[3])]
SIZES += [slow(rows, TILES[0]) for rows in (1, 63, 64, 128, 129, 176)]
SIZES += [slow(rows, tile) for tile in TILES[1:] for rows in (1, 129) if (rows, tile) not in SIZES]
MANY_ROWS = [slow(1408, TILES[1])]


class Operands:
    """x of rows that are not contiguous, weights of `2 * width` rows, all of the kind; `product` in float64."""

    def __init__(self, device: torch.device, rows: int, inputs: int = 128, width: int = 128) -> None:
        kind = sixteen_bits(device)

        def random(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, device=device) * scale).to(kind)

        self.x = random(rows, 2 * inputs)[:, inputs:]
        self.gate_up = random(2 * width, inputs, scale=inputs**-0.5)
        self.weight, self.gate_up_bias = self.gate_up[:width], random(2 * width)
        self.bias = self.gate_up_bias[:width]
        self.residual, self.norm = random(rows, width, scale=3.0), random(width)
        self.next = random(2 * width, width, scale=width**-0.5)
        self.gate_up_product = self.x.double() @ self.gate_up.double().T
        self.product = self.gate_up_product[:, :width] + self.bias.double()


@pytest.mark.parametrize(("rows", "tile"), SIZES + MANY_ROWS, ids=str)
def test_bias_silu_and_gelu(device: torch.device, rows: int, tile: Tile) -> None:
    given = Operands(device, rows)
    out = replayed(device, lambda: tiled_gemm(given.x, given.weight, given.bias, tile))
    assert relative_error(out, given.product) < LIMIT
    out = replayed(device, lambda: tiled_gemm(given.x, given.gate_up, None, tile, "silu_mul"))
    assert relative_error(out, silu_mul.reference(given.gate_up_product)) < LIMIT
    biased = silu_mul.reference(given.gate_up_product + given.gate_up_bias.double())
    out = replayed(device, lambda: tiled_gemm(given.x, given.gate_up, given.gate_up_bias, tile, "silu_mul"))
    assert relative_error(out, biased) < LIMIT
    out = replayed(device, lambda: tiled_gemm(given.x, given.weight, given.bias, tile, "quick_gelu"))
    assert relative_error(out, given.product * torch.sigmoid(1.702 * given.product)) < LIMIT


@pytest.mark.parametrize(("rows", "tile"), SIZES, ids=str)
def test_shares_of_the_inputs_and_norm(device: torch.device, rows: int, tile: Tile) -> None:
    given = Operands(device, rows)
    normed, total = replayed(
        device,
        lambda: split_gemm_add_norm(
            given.x, given.weight, given.bias, given.residual, given.norm, EPS, split=2, tile=tile
        ),
    )
    expected = add_rms_norm.reference(given.product, *wide_in_place(given.residual, given.norm), EPS)
    assert relative_error(normed, expected[0]) < LIMIT
    assert relative_error(total, expected[1]) < LIMIT


@pytest.mark.parametrize(("rows", "tile"), SIZES + MANY_ROWS, ids=str)
def test_norm_whose_scale_comes_after_the_next_product(device: torch.device, rows: int, tile: Tile) -> None:
    given = Operands(device, rows)

    def run() -> tuple[Tensor, ...]:
        deferred, total = gemm_add_deferred_norm(
            given.x, given.weight, given.bias, given.residual, given.norm, EPS, tile
        )
        width = given.weight.shape[0]
        plain = tiled_gemm(deferred, given.next[:width], given.bias, tile)
        return total, plain, tiled_gemm(deferred, given.next, None, tile, "silu_mul"), deferred.squares

    total, plain, gated, squares = replayed(device, run)
    normed, expected = add_rms_norm.reference(given.product, *wide_in_place(given.residual, given.norm), EPS)
    assert relative_error(total, expected) < LIMIT
    assert relative_error(squares.sum(1), expected.square().sum(1)) < LIMIT
    product = normed @ given.next.double().T
    assert relative_error(plain, product[:, : given.weight.shape[0]] + given.bias.double()) < LIMIT
    assert relative_error(gated, silu_mul.reference(product)) < LIMIT


def test_norm_of_one_row_in_the_vectors_products_that_read_it(device: torch.device) -> None:
    """But not where its weight is float32, of which every program would read twice as much."""
    given = Operands(device, 1)

    def add(weight: Tensor) -> tuple[Any, Tensor]:
        after = given.residual, weight, EPS
        return gemm.gemm_add_norm(given.x, given.weight, given.bias, *after, deferrable=True)

    assert isinstance(add(given.norm.float())[0], Tensor)
    normed, total = replayed(device, lambda: add(given.norm))
    assert isinstance(normed, VectorNorm)
    assert relative_error(total, given.product + given.residual.double()) < LIMIT
    product = rms_norm.reference(total.double(), given.norm.double(), EPS) @ given.next.double().T
    out = replayed(device, lambda: gemm.gemm(normed, given.next, None, "silu_mul"))
    assert relative_error(out, silu_mul.reference(product)) < LIMIT
    narrow = replayed(device, lambda: gemm.narrow_gemm(normed, given.next[:16]))
    assert relative_error(narrow, product[:, :16]) < LIMIT


def test_an_odd_number_of_column_tiles(device: torch.device) -> None:
    """Squares of three tiles are read by four."""
    given = Operands(device, 70, inputs=64, width=192)
    tile = TILES[0]

    def run() -> Tensor:
        deferred, _ = gemm_add_deferred_norm(given.x, given.weight, None, given.residual, given.norm, EPS, tile)
        return tiled_gemm(deferred, given.next, None, tile)

    total = given.gate_up_product[:, :192] + given.residual.double()
    expected = rms_norm.reference(total, given.norm.double(), EPS) @ given.next.double().T
    assert relative_error(replayed(device, run), expected) < LIMIT


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "inputs", "inner"), [(176, 1024, 4096), (1408, 1024, 4096), (8, 1536, 8960)])
@pytest.mark.parametrize("tma", [False, True])
def test_at_size(rows: int, inputs: int, inner: int, tma: bool) -> None:
    """Gate and up, then down with its residual and norm, as a layer has them."""
    device = torch.device("cuda")
    given = Operands(device, rows, inputs, inner)
    tile = Tile(128, 64, 64, warps=8, stages=4, tma=tma) if rows > 8 else Tile(16, 64, 128, swap=True, tma=tma)
    hidden = replayed(device, lambda: tiled_gemm(given.x, given.gate_up, None, tile, "silu_mul"))
    assert relative_error(hidden, silu_mul.reference(given.gate_up_product)) < LIMIT
    shapes = ((inputs, inner), (rows, inputs), (inputs,))
    down, residual, norm = (torch.randn(shape, device=device, dtype=torch.bfloat16) for shape in shapes)
    down *= inner**-0.5

    def add() -> tuple[Tensor, Tensor]:
        deferred, total = gemm_add_deferred_norm(hidden, down, None, residual, norm, EPS, tile)
        return tiled_gemm(deferred, given.gate_up, None, tile, "silu_mul"), total

    out, total = replayed(device, add)
    normed, expected = add_rms_norm.reference(hidden.double() @ down.double().T, residual.double(), norm.double(), EPS)
    assert relative_error(total, expected) < LIMIT
    assert relative_error(out, silu_mul.reference(normed @ given.gate_up.double().T)) < LIMIT


def test_blocks_whose_norms_wait(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both stacks give what they give without a table; the rows that leave have their norm at once."""
    kind = sixteen_bits(device)
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

    with gemm_configs.using({}):
        expected = run()
    asked, at_once = 0, block.gemm_add_norm

    def deferred(*given: Any, deferrable: bool) -> Any:
        nonlocal asked
        if not deferrable:
            return at_once(*given)
        asked += 1
        *given, lora = given
        assert lora is None
        return gemm_add_deferred_norm(*given, TILES[0])

    monkeypatch.setattr(block, "gemm_add_norm", deferred)
    for out, reference in zip(run(), expected, strict=True):
        assert out.shape == reference.shape
        assert relative_error(out, reference) < LIMIT
    assert asked == 5 + 3


@pytest.mark.parametrize("rows", [2, 16, 17, 40, 64])
def test_logits_of_few_rows(device: torch.device, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head over a vocabulary has a tile of its own; the interpreter's is a small one."""
    outputs = 1 << 16 if device.type == "cuda" else 192
    monkeypatch.setattr(gemm, "_VOCABULARY", outputs)
    kind = sixteen_bits(device)
    x, weight = (torch.randn(n, 128, device=device).to(kind) for n in (rows, outputs))
    way = gemm.vocabulary("plain", x, weight)
    assert way is not None and way.tile is not None
    assert way.tile.rows >= rows
    assert relative_error(tiled_gemm(x, weight, None, way.tile), x.double() @ weight.double().T) < LIMIT
    assert gemm.vocabulary("plain", x.repeat(33, 1), weight) is None
    assert gemm.vocabulary("plain", x, weight[:-1]) is None


H100, A100, B200 = INTERPRETER, Gpu("A100", (8, 0), 163 << 10, 108), Gpu("B200", (10, 0), 227 << 10, 148)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 128, 300])
def test_one_program_takes_tile_after_tile(
    device: torch.device, rows: int, bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = dataclasses.replace(persistent_gemm.current_gpu(), num_sms=2)
    monkeypatch.setattr(persistent_gemm, "current_gpu", lambda: small)
    given = Operands(device, rows, 128, 256)
    offset = given.gate_up_bias if bias else None
    out = replayed(device, lambda: persistent_gemm.persistent_gemm(given.x, given.gate_up, offset))
    product = given.gate_up_product + (given.gate_up_bias.double() if bias else 0.0)
    assert relative_error(out, silu_mul.reference(product)) < LIMIT


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"),
    [(span[1] - 24, *shape) for shape, spans in persistent_gemm.SM_90_PERSISTENT.items() for span in spans],
)
def test_persistent_programs_at_size(rows: int, inputs: int, outputs: int) -> None:
    given = Operands(torch.device("cuda"), rows, inputs, outputs)
    if torch.cuda.get_device_capability() == (9, 0):
        assert gemm.way_of("silu_mul", given.x, given.gate_up).kernel == "persistent"
    x, weight, bias = given.x, given.gate_up, given.gate_up_bias
    out = replayed(x.device, lambda: persistent_gemm.persistent_gemm(x, weight, bias))
    assert relative_error(out, silu_mul.reference(given.gate_up_product + bias.double())) < LIMIT


@pytest.mark.parametrize(
    ("gpu", "rows", "outputs", "dtype", "kernel"),
    [
        (H100, 1024, 8960, torch.bfloat16, "persistent"),
        (H100, 2048, 8960, torch.float16, "persistent"),
        (H100, 2049, 8960, torch.bfloat16, "cublas"),
        (H100, 448, 8960, torch.bfloat16, "tiled"),
        (H100, 1024, 8960, torch.float32, "cublas"),
        (H100, 1024, 8832, torch.bfloat16, "cublas"),
        (A100, 1024, 8960, torch.bfloat16, "cublas"),
        (B200, 1024, 8960, torch.bfloat16, "cublas"),
    ],
)
def test_where_it_was_not_measured_cublas_multiplies(
    gpu: Gpu, rows: int, outputs: int, dtype: torch.dtype, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("models.layers.kernels.gpu.probe", lambda: gpu)
    x, weight = (torch.empty(n, 1536, dtype=dtype, device="meta") for n in (rows, 2 * outputs))
    assert gemm.way_of("silu_mul", x, weight).kernel == kernel
