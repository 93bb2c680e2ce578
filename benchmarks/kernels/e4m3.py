"""GEMMs of decode steps and prefills with weights in e4m3, in every configuration that could win, compared with the
package's current GEMMs in bfloat16.

One row is a GEMV with the operations around it. Few rows are multiplied in 16 bits. Many rows may be quantised to e4m3
themselves, in kernels of this package ("eight bits") or in cuBLAS ("scaled_mm"), or the weight is expanded first.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

import torch
import torch.nn.functional as F

from benchmarks.kernels.gemms import EPS, Operands, Part, layer
from benchmarks.kernels.timing import Case, Run
from benchmarks.roofline.gpu import bytes_per_second
from models.layers.kernels import e4m3
from models.layers.kernels.elementwise import silu_mul
from models.layers.kernels.gemm_types import Blocks, Shape, Tile, Variant
from models.layers.kernels.gemv import gemv
from models.layers.kernels.norms import add_rms_norm
from models.layers.quantized import QuantizedWeight

MODELS = {
    "qwen2b": (*layer(1536, 8960, 12, 2), Part("head", "plain", 1536, 151936)),
    "qwen7b": (*layer(3584, 18944, 28, 4), Part("head", "plain", 3584, 152064)),
}
ROWS = (1, 8, 32, 128, 384)
_MOST_OF_A_HEAD = 128
BLOCKS = (
    Blocks(4, 256),
    Blocks(8, 256),
    Blocks(8, 256, 8),
    Blocks(16, 256),
    Blocks(2, 512, 2),
    Blocks(4, 512),
    Blocks(8, 512),
    Blocks(4, 1024, 8),
)
_NUM_SMS = 132
_WANTED = 1.5
"""Thread blocks for each of them."""


@lru_cache(maxsize=1)
def _operands(part: Part, rows: int, in_e4m3: bool) -> Operands:
    return Operands(Shape(part.kind, part.inputs, part.outputs, in_e4m3), rows, torch.device("cuda"))


def _vector(part: Part, blocks: Blocks | None, in_e4m3: bool) -> Run:
    """The GEMVs of a decode step of one row: with the norm before q, k, v, gate and up, and with the residual after the
    others."""
    given = _operands(part, 1, in_e4m3)
    norm = (torch.randn(part.inputs, device="cuda", dtype=torch.bfloat16), EPS) if part.kind != "add_norm" else None
    norm = None if part.name == "head" else norm
    residual = given.residual[:, : part.outputs] if part.kind == "add_norm" else None

    def run(index: int) -> object:
        weight = given.weights[index % len(given.weights)]
        gated = part.kind == "silu_mul"
        return gemv(given.x, weight, norm=norm, residual=residual, silu_mul=gated, blocks=blocks)

    return run


def _tiled(part: Part, rows: int, variant: Variant | None, in_e4m3: bool) -> Run:
    given = _operands(part, rows, in_e4m3)
    if part.name != "head":
        given.check(variant)
    return lambda index: given.run(index, variant)


def _around(part: Part, rows: int, *, eight_bit: bool) -> Run:
    """The GEMM by cuBLAS, and a kernel for the operations after it."""
    given = _operands(part, rows, True)

    def run(index: int) -> object:
        weight = given.weights[index % len(given.weights)]
        assert isinstance(weight, QuantizedWeight)
        y = e4m3.eight_bit_gemm(given.x, weight) if eight_bit else F.linear(given.x, weight.dequantised(given.x.dtype))
        if part.kind == "silu_mul":
            return silu_mul(y)
        return add_rms_norm(y, given.residual, given.norm, EPS) if part.kind == "add_norm" else y

    return run


def _tiles(rows: int, gated: bool) -> Iterator[Variant]:
    least = min(64, max(16, rows))
    few = (
        Tile(least, 64, 128, 4, 6, swap=True),
        Tile(least, 64, 128, 4, 8, swap=True),
        Tile(least, 64, 128, 4, 6, swap=True, tma=True),
        Tile(least, 64, 256, 4, 4, swap=True),
        Tile(least, 32, 256, 4, 4),
        Tile(least, 16, 256, 4, 4),
    )
    many = (
        Tile(64, 64, 128, 4, 4, swap=True),
        Tile(128, 64, 128, 4, 4, swap=True),
        Tile(128, 128, 128, 8, 3, swap=True),
    )
    narrow = (
        Tile(64, 64, 128, 4, 6, tma=True),
        Tile(64, 128, 128, 4, 4, tma=True),
        Tile(128, 64, 128, 4, 4, tma=True),
        Tile(128, 128, 128, 8, 4, tma=True),
        *(() if gated else (Tile(128, 256, 128, 8, 3, tma=True),)),
    )
    if rows <= 64:
        yield from (Variant(tile) for tile in few)
    else:
        yield from (Variant(tile) for tile in many)
        yield from (Variant(tile, eight_bit=True) for tile in narrow)


def variants(part: Part, rows: int) -> Iterator[Variant]:
    """With a residual and norm, split-K fills the GPU."""
    for variant in _tiles(rows, part.kind == "silu_mul"):
        tile = variant.tile
        if part.outputs % tile.columns or part.inputs % tile.depth:
            continue
        if part.kind != "add_norm":
            yield variant
            continue
        programs = -(-rows // tile.rows) * (part.outputs // tile.columns)
        splits = [split for split in range(1, 15) if part.inputs % (split * tile.depth) == 0]
        split = min(splits, key=lambda split: abs(split * programs - _WANTED * _NUM_SMS))
        yield Variant(tile, split=split, eight_bit=variant.eight_bit)


def blocks_name(blocks: Blocks) -> str:
    return f"gemv {blocks.outputs}x{blocks.depth}w{blocks.warps}"


def cases() -> list[Case]:
    found: list[Case] = []
    for model, parts in MODELS.items():
        for part in parts:
            for rows in ROWS:
                if part.name == "head" and rows > _MOST_OF_A_HEAD:
                    continue
                found += _of(f"{model} {part.name}, {rows} rows", model, part, rows)
    return found


def _of(shape: str, model: str, part: Part, rows: int) -> Iterator[Case]:
    num_bytes = part.inputs * part.outputs * (2 if part.kind == "silu_mul" else 1)
    floor = round(num_bytes / bytes_per_second() * 1e6, 2)

    def case(variant: str, make: object) -> Case:
        return Case(model, shape, variant, make, floor, calls=8 if part.name == "head" else 24)  # type: ignore[arg-type]

    if rows == 1:
        yield case("bfloat16", lambda: _vector(part, None, False))
        for blocks in BLOCKS:
            if not part.outputs % blocks.outputs:
                yield case(blocks_name(blocks), lambda blocks=blocks: _vector(part, blocks, True))
        return
    yield case("bfloat16", lambda: _tiled(part, rows, None, False))
    for variant in variants(part, rows):
        yield case(str(variant), lambda variant=variant: _tiled(part, rows, variant, True))
    if rows >= 64:
        yield case("scaled_mm", lambda: _around(part, rows, eight_bit=True))
        yield case("multiplied out", lambda: _around(part, rows, eight_bit=False))
