"""Weights that are held as codes, with scales of groups and zeros, in the GEMV, in tiles and in grouped GEMMs of
experts, against their dequantised values in float64."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.layers import gemm as gemms
from models.layers.fused import silu_mul as fused_silu_mul
from models.layers.kernels import e4m3, gemm
from models.layers.kernels.gemm_types import Blocks, Kind, Tile
from models.layers.kernels.gemv import gemv
from models.layers.kernels.tiled_gemm import gemm_add_deferred_norm, split_gemm_add_norm, tiled_gemm
from models.layers.moe import expert_places, grouped_codes
from models.layers.norms import DeferredNorm, add_rms_norm, rms_norm
from models.layers.op import Op
from models.layers.quantized import COLUMNS, QuantizedWeight, Scheme, ordered
from models.layers.quantized import quantise_rows as quantise_rows_reference
from tests.models.kernels.checking import by_kernels, relative_error, replayed, sixteen_bits
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


def drawn_weight(device: torch.device, outputs: int, inputs: int) -> QuantizedWeight:
    """In e4m3, with a row of zeros and rows of very different sizes."""
    drawn = torch.randn(outputs, inputs, device=device) * inputs**-0.5
    drawn *= torch.logspace(-2, 1, outputs, device=device)[torch.randperm(outputs, device=device), None]
    drawn[outputs // 2] = 0.0
    with device:
        weight = QuantizedWeight(outputs, inputs)
    weight.rows.quantise(drawn, "drawn")
    return weight


class Operands:
    """scheme: of random codes; None for weights in e4m3 that are made from drawn values."""

    def __init__(
        self, device: torch.device, scheme: Scheme | None, rows: int, inputs: int = INPUTS, width: int = OUTPUTS
    ) -> None:
        def random(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, device=device) * scale).to(sixteen_bits(device))

        def weight(outputs: int) -> QuantizedWeight:
            if scheme is None:
                return drawn_weight(device, outputs, inputs)
            return weight_of(device, scheme, outputs, inputs)

        self.x = random(rows, 2 * inputs)[:, inputs:]
        self.gate_up, self.weight = weight(2 * width), weight(width)
        self.bias, self.residual, self.norm = random(width), random(rows, width, scale=3.0), random(width)
        self.norm_before = random(inputs)

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
    kind = sixteen_bits(device)
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
    # The rules quantise more rows, too, where tensor cores multiply e4m3.
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
    kind = sixteen_bits(device)
    weight = weight_of(device, scheme, COLUMNS, 2 * INPUTS)
    wide = weight.dequantised(torch.float32).to(kind)
    expected = wide if weight.order is None else wide[:, weight.order]
    assert torch.equal(replayed(device, lambda: e4m3.dequantise(weight, kind)), expected)


@pytest.mark.parametrize("rows", [5, 40])
@schemes("u4, groups of 128, zeros", "e4m3, blocks", ordered=False)
def test_grouped_gemms_of_experts(device: torch.device, scheme: Scheme, rows: int) -> None:
    """Experts without rows, with one, and with more than a tile."""
    kind = sixteen_bits(device)
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


# In e4m3, with one scale for each output

E4M3_LIMIT = 8e-3
SHAPES = [(2048, 1536), (1536, 1536), (1536, 8960), (4608, 3584), (3584, 18944)]
"""Outputs and inputs of Qwen2-VL-2B's and 7B's layers."""


def test_every_value_is_widened_exactly(device: torch.device) -> None:
    """All 254 finite values times 1, one for each output; the tensor cores add zeros."""
    kind = sixteen_bits(device)
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
        *(tiled_gemm(ones, weight, None, tile) for tile in (SWAPPED, *TILES)),
    ):
        assert torch.equal(out[0, :254].double().cpu(), expected)


def test_gemv_of_inputs_that_are_no_whole_groups(device: torch.device) -> None:
    """The embedded chat model has 192: their halves are not interleaved, and the weight is dequantised in each step.
    Our kernel reads weights before the kernels ahead of it are done, so it read some that were not written yet: one
    step in some thousands had wrong logits."""
    given = Operands(device, None, 1, 192, 64)
    with pytest.raises(ValueError, match="192 inputs"):
        gemv(given.x, given.weight)
    expected = given.residual.double() + given.product(given.weight)
    launched = AssertionError("a kernel of ours was launched")
    with by_kernels(device), patch.object(Op, "launch", side_effect=launched):
        out = replayed(device, lambda: gemms.gemv(given.x, given.weight, residual=given.residual))
    assert relative_error(out, expected) < E4M3_LIMIT


@pytest.mark.parametrize("rows", [1, 7, 33])
def test_padding_rows_do_not_leak(device: torch.device, rows: int) -> None:
    """Rows of NaN and infinity behind the first: a row's result is its own."""
    given = Operands(device, None, rows + 5)
    clean = gemms.gemm.kernel(given.x, given.weight, given.bias)[:rows]
    given.x[rows:] = torch.tensor(float("nan"))
    given.x[-1] = torch.tensor(float("inf"))
    poisoned = replayed(device, lambda: gemms.gemm.kernel(given.x, given.weight, given.bias))[:rows]
    assert torch.equal(clean, poisoned)


def limit_of(kind: Kind, x: torch.Tensor, weight: QuantizedWeight) -> float:
    """Of an error where activations may be rounded to e4m3 themselves."""
    way = gemm.way_of(kind, x, weight)
    eight_bit = way.kernel == "eight_bit" or (way.variant is not None and way.variant.eight_bit)
    return 4e-2 if eight_bit else E4M3_LIMIT


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 8, 16, 32, 64, 128, 384])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES, ids=str)
def test_the_chosen_way_at_real_shapes(device: torch.device, rows: int, outputs: int, inputs: int) -> None:
    """Replayed, in every bucket; more rows than are streamed are rounded to e4m3 themselves."""
    given = Operands(device, None, rows, inputs, outputs)
    limit = limit_of("plain", given.x, given.weight)
    product = given.product(given.weight) + given.bias.double()
    out = replayed(device, lambda: gemms.gemm.kernel(given.x, given.weight, given.bias))
    assert relative_error(out, product) < limit
    eager = gemms.gemm.kernel(given.x, given.weight, given.bias)
    assert torch.equal(out, eager)
    out = replayed(device, lambda: gemms.gemm.kernel(given.x, given.gate_up, None, "silu_mul"))
    gated = fused_silu_mul.reference(given.product(given.gate_up))
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
    given = Operands(device, None, rows, 1536, 512)
    values, scale = e4m3.quantise_rows(given.x)
    x = ordered(values).double() * scale.double()
    expected = x @ given.weight.dequantised(torch.float64).T + given.bias.double()
    for out in (
        replayed(device, lambda: tiled_gemm(given.x, given.weight, given.bias, tile, eight_bit=True)),
        replayed(device, lambda: e4m3.eight_bit_gemm(given.x, given.weight, given.bias)),
    ):
        assert relative_error(out, expected) < E4M3_LIMIT


def test_many_rows_read_the_copy_where_one_is_kept(device: torch.device) -> None:
    """The copy here is of other values, so that it shows which of both was read."""
    given = Operands(device, None, 8)
    other = torch.randn(given.weight.shape, device=device).to(given.x.dtype)
    given.weight.copy, given.weight.copy_from = torch.nn.Parameter(other, requires_grad=False), 8
    copied = given.x.double() @ other.double().T
    after = given.residual, given.norm, EPS
    for x, expected in ((given.x, copied), (given.x[:7], given.product(given.weight)[:7])):
        rows = len(x)
        assert relative_error(gemm.gemm(x, given.weight), expected) < E4M3_LIMIT
        for deferrable in (False, True):
            residual = given.residual[:rows]
            _, total = gemm.gemm_add_norm(x, given.weight, None, residual, *after[1:], deferrable=deferrable)
            assert relative_error(total, expected + given.residual[:rows].double()) < E4M3_LIMIT
