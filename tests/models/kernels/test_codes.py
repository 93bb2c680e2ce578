"""Weights that are held as codes, with scales of groups and zeros, in the GEMV, in tiles and in grouped GEMMs of
experts, against their dequantised values in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.layers.deferred_norm import DeferredNorm
from models.layers.kernels import e4m3, gemm
from models.layers.kernels.gemm_types import Blocks, Tile
from models.layers.kernels.gemv import gemv
from models.layers.kernels.tiled_gemm import gemm_add_deferred_norm, split_gemm_add_norm, tiled_gemm
from models.layers.moe import expert_places, grouped_codes
from models.layers.norms import add_rms_norm, rms_norm
from models.layers.quantized import COLUMNS, QuantizedWeight, Scheme
from tests.models.kernels.checking import relative_error, replayed
from tests.support.slow import slow

EPS = 1e-5
LIMIT = 4e-3
SCHEMES = {
    "u4, groups of 32, zeros": Scheme("u4", 32, torch.bfloat16, zeros=True),
    "u4, groups of 64": Scheme("u4", 64, torch.float16),
    "u4, groups of 128, zeros": Scheme("u4", 128, torch.float16, zeros=True),
    "u4, one group, reordered": Scheme("u4", 128, torch.float16, zeros=True, ordered=True),
    "u4, one group": Scheme("u4", 0, torch.bfloat16),
    "u8, groups of 64, zeros": Scheme("u8", 64, torch.float16, zeros=True),
    "u8, one group": Scheme("u8", 0, torch.bfloat16),
    "e4m3, blocks": Scheme("e4m3", 128, torch.float32),
    "e4m3, one scale for each output": Scheme("e4m3", 0, torch.bfloat16),
}
ONE_SCALE = "e4m3, one scale for each output"
QUICK = ("u4, groups of 32, zeros", "u4, one group, reordered", "u8, groups of 64, zeros", "e4m3, blocks", ONE_SCALE)
INPUTS, OUTPUTS = 256, 128
SWAPPED = Tile(16, 64, 128, warps=4, stages=4, swap=True)
AHEAD = Tile(8, 64, 128, warps=2, stages=4, swap=True)
TILES = [
    Tile(64, 64, 128, warps=4, stages=4, swap=True, tma=True),
    Tile(64, 32, 256, warps=4, stages=3),
    Tile(16, 16, 256, warps=4, stages=3),
    Tile(128, 64, 128, warps=4, stages=3, swap=True),
]


def schemes(*names: str, ordered: bool = True) -> pytest.MarkDecorator:
    """All of them, of which the others than `names` may take longer. ordered: also those that reorder inputs."""
    return pytest.mark.parametrize(
        "scheme",
        [
            pytest.param(scheme, marks=[] if name in names else [pytest.mark.slow], id=name)
            for name, scheme in SCHEMES.items()
            if ordered or not scheme.ordered
        ],
    )


def weight_of(device: torch.device, scheme: Scheme, *shape: int) -> QuantizedWeight:
    """Codes, scales and zeros that differ everywhere."""
    with device:
        weight = QuantizedWeight(*shape, scheme=scheme)
    codes = torch.randint(0, 256, weight.values.view(torch.uint8).shape, dtype=torch.uint8)
    if scheme.codes == "e4m3":
        codes[codes & 0x7F == 0x7F] = 1
    weight.values.view(torch.uint8).copy_(codes)
    size = {"u4": 5, "u8": 74, "e4m3": 100}[scheme.codes]
    scale = torch.rand(weight.scale.shape) + 0.3
    weight.scale.copy_(scale * shape[-1] ** -0.5 / size)
    if weight.zeros is not None:
        weight.zeros.copy_(torch.randint(0, 16 if scheme.codes == "u4" else 256, weight.zeros.shape))
    if weight.order is not None:
        weight.order.copy_(torch.randperm(shape[-1]))
    return weight


class Operands:
    def __init__(self, device: torch.device, scheme: Scheme, rows: int) -> None:
        # The interpreter has no bfloat16 arithmetic of its own; float16 takes the same paths.
        kind = torch.bfloat16 if device.type == "cuda" else torch.float16

        def random(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, device=device) * scale).to(kind)

        self.x = random(rows, 2 * INPUTS)[:, INPUTS:]
        self.gate_up = weight_of(device, scheme, 2 * OUTPUTS, INPUTS)
        self.weight = weight_of(device, scheme, OUTPUTS, INPUTS)
        self.bias, self.residual, self.norm = random(OUTPUTS), random(rows, OUTPUTS, scale=3.0), random(OUTPUTS)
        self.norm_before = random(INPUTS)

    def product(self, weight: QuantizedWeight) -> Tensor:
        return self.x.double() @ weight.dequantised(torch.float64).T


def silu_mul(product: Tensor, kind: torch.dtype) -> Tensor:
    """gate and up float64 [..., 2 * inner] -> silu(gate) * up, rounded where models.layers.fused.silu_mul of a product
    in 16 bits is. In bfloat16 these roundings alone are 3.4e-3 of the result, of few values up to 6.7e-3."""
    gate, up = product.to(kind).double().chunk(2, -1)
    return F.silu(gate).to(kind).double() * up


@pytest.mark.parametrize("blocks", [Blocks(4, 64), slow(None), slow(Blocks(16, 128, 8))], ids=str)
@schemes("u4, groups of 32, zeros", ONE_SCALE)
def test_gemv(device: torch.device, scheme: Scheme, blocks: Blocks | None) -> None:
    given = Operands(device, scheme, 1)
    norm = given.norm_before.float() if blocks is None else given.norm_before
    out = replayed(
        device,
        lambda: gemv(given.x, given.weight, given.bias, norm=(norm, EPS), residual=given.residual, blocks=blocks),
    )
    normed = rms_norm.reference(given.x.double(), norm.double(), EPS)
    expected = normed @ given.weight.dequantised(torch.float64).T + given.bias.double() + given.residual.double()
    assert relative_error(out, expected) < LIMIT
    out = replayed(device, lambda: gemv(given.x, given.gate_up, silu_mul=True, blocks=blocks))
    assert relative_error(out, silu_mul(given.product(given.gate_up), out.dtype)) < LIMIT


@schemes("u4, groups of 32, zeros", ONE_SCALE)
def test_gemv_of_chosen_experts(device: torch.device, scheme: Scheme) -> None:
    kind = torch.bfloat16 if device.type == "cuda" else torch.float16
    stack = weight_of(device, scheme, 3, 64, 128)
    wide = stack.dequantised(torch.float64)
    x, index = torch.randn(2, 128, device=device).to(kind), torch.tensor([2, 0, 1, 2], device=device)
    for silu in (False, True):
        out = replayed(device, lambda silu=silu: gemv(x, stack, index=index, fan_out=2, silu_mul=silu))
        expected = torch.stack([wide[int(e)] @ x[i // 2].double() for i, e in enumerate(index)])
        assert relative_error(out, silu_mul(expected, kind) if silu else expected) < LIMIT


BEHIND = [(name, 19, SWAPPED) if name in QUICK else slow(name, 19, SWAPPED) for name in SCHEMES]
BEHIND += [slow(ONE_SCALE, rows, tile) for tile in TILES for rows in (2, 65, 129)]
BEHIND += [("u4, groups of 128, zeros", 9, AHEAD), *(slow(name, 9, AHEAD) for name in SCHEMES)]


@pytest.mark.parametrize(("name", "rows", "tile"), BEHIND, ids=str)
def test_tiles_with_what_stands_behind(device: torch.device, name: str, rows: int, tile: Tile) -> None:
    given = Operands(device, SCHEMES[name], rows)
    x = e4m3.in_order(given.x, given.weight)
    assert isinstance(x, Tensor)
    product = given.product(given.weight) + given.bias.double()
    # The rules quantise more rows, too, where tensor cores multiply e4m3 (test_e4m3.py).
    by_rule = rows <= 64
    split = 1 if tile.depth > 128 else 2
    plain = [lambda: tiled_gemm(x, given.weight, given.bias, Tile(32, 32, 128, stages=3))]
    plain.append(lambda: tiled_gemm(x, given.weight, given.bias, tile, split=split))
    if by_rule:
        plain.append(lambda: gemm.gemm(given.x, given.weight, given.bias))
        out = replayed(device, lambda: gemm.gemm(given.x, given.gate_up, None, "silu_mul"))
        assert relative_error(out, silu_mul(given.product(given.gate_up), out.dtype)) < LIMIT
    for run in plain:
        assert relative_error(replayed(device, run), product) < LIMIT
    after = (given.residual.double(), given.norm.double(), EPS)
    expected = add_rms_norm.reference(product, *after)
    behind = given.bias, given.residual, given.norm, EPS
    ordered, bias = e4m3.in_order(given.x, given.gate_up), given.bias.repeat(2)
    out = replayed(device, lambda: tiled_gemm(ordered, given.gate_up, bias, tile, "silu_mul", split=split))
    assert relative_error(out, silu_mul(given.product(given.gate_up) + bias.double(), out.dtype)) < LIMIT
    with_norm = [
        lambda: split_gemm_add_norm(x, given.weight, *behind, split=split, tile=tile),
        lambda: gemm_add_deferred_norm(x, given.weight, *behind, tile),
    ]
    if by_rule:
        with_norm.append(lambda: gemm.gemm_add_norm(given.x, given.weight, *behind))
    for normed, total in (replayed(device, run) for run in with_norm):
        assert relative_error(normed.normed() if isinstance(normed, DeferredNorm) else normed, expected[0]) < LIMIT
        assert relative_error(total, expected[1]) < LIMIT


def test_a_deferred_norm_before_reordered_inputs(device: torch.device) -> None:
    given = Operands(device, SCHEMES["u4, one group, reordered"], 3)
    squares = given.x.float().square().unflatten(-1, (-1, 64)).sum(-1)
    before = DeferredNorm((given.x * given.norm_before), squares, EPS)
    out = replayed(device, lambda: gemm.gemm(before, given.weight, given.bias))
    expected = before.normed().double() @ given.weight.dequantised(torch.float64).T + given.bias.double()
    assert relative_error(out, expected) < LIMIT


@schemes(*SCHEMES)
def test_dequantised_values_are_rounded_once(device: torch.device, scheme: Scheme) -> None:
    """Every code meets every zero somewhere; inputs stay in the order in which they lie."""
    kind = torch.bfloat16 if device.type == "cuda" else torch.float16
    weight = weight_of(device, scheme, COLUMNS, 2 * INPUTS)
    wide = weight.dequantised(torch.float32).to(kind)
    expected = wide if weight.order is None else wide[:, weight.order]
    assert torch.equal(replayed(device, lambda: e4m3.dequantise(weight, kind)), expected)


@pytest.mark.parametrize("rows", [5, 40])
@schemes("u4, groups of 128, zeros", "e4m3, blocks", ordered=False)
def test_grouped_gemms_of_experts(device: torch.device, scheme: Scheme, rows: int) -> None:
    """Experts without rows, with one, and with more than a tile."""
    kind = torch.bfloat16 if device.type == "cuda" else torch.float16
    stack = weight_of(device, scheme, 4, 64, 128)
    experts = torch.where(torch.arange(rows) < 3, 1, 3)[:, None].to(device)
    experts[0] = 0
    _, ends = expert_places(experts, 4)
    x = torch.randn(rows, 128, device=device).to(kind)
    out = replayed(device, lambda: grouped_codes.kernel(x, stack, ends))
    wide = stack.dequantised(torch.float64)
    expected = torch.stack([wide[int(e)] @ row.double() for e, row in zip(experts.sort(0).values, x, strict=True)])
    assert relative_error(out, expected) < LIMIT
    assert relative_error(grouped_codes.reference(x.float(), stack, ends), expected) < 1e-5
