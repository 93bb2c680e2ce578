"""Configurations of GEMMs with weights in e4m3 measured on an H100, for every GPU of compute capability 9.0. COPIES:
inputs and outputs of layers that keep a copy in 16 bits, and the rows from which it is read.

`python -m benchmarks.kernels.choose_e4m3` writes it from the results of `python -m benchmarks.kernels e4m3`.
"""

from __future__ import annotations

from collections.abc import Mapping

from models.layers.kernels.gemm_types import Blocks, Choice, Shape, Table, Tile, Variant

SM_90_E4M3: Table = {
    Shape("plain", 1536, 2048, e4m3=True): (
        Choice(2, 16, Variant(Tile(16, 32, 256, 4, 4))),
        Choice(17, 32, Variant(Tile(32, 64, 256, 4, 4, swap=True))),
        Choice(65, 192, Variant(Tile(64, 64, 128, 4, 6, tma=True), eight_bit=True)),
        Choice(193, 512, Variant(Tile(64, 64, 128, 4, 4, swap=True))),
    ),
    Shape("add_norm", 1536, 1536, e4m3=True): (
        Choice(2, 16, Variant(Tile(16, 64, 128, 4, 8, swap=True), split=6)),
        Choice(17, 32, Variant(Tile(32, 64, 128, 4, 6, swap=True), split=6)),
        Choice(65, 192, Variant(Tile(64, 64, 128, 4, 4, swap=True), split=4)),
        Choice(193, 512, Variant(Tile(64, 64, 128, 4, 4, swap=True))),
    ),
    Shape("silu_mul", 1536, 8960, e4m3=True): (
        Choice(2, 16, Variant(Tile(16, 32, 256, 4, 4))),
        Choice(17, 32, Variant(Tile(32, 64, 256, 4, 4, swap=True))),
        Choice(65, 192, Variant(Tile(128, 128, 128, 8, 4, tma=True), eight_bit=True)),
        Choice(193, 512, Variant(Tile(128, 128, 128, 8, 4, tma=True), eight_bit=True)),
    ),
    Shape("add_norm", 8960, 1536, e4m3=True): (
        Choice(2, 16, Variant(Tile(16, 64, 256, 4, 4, swap=True), split=7)),
        Choice(17, 32, Variant(Tile(32, 64, 128, 4, 6, swap=True), split=7)),
        Choice(65, 192, Variant(Tile(64, 64, 128, 4, 4, swap=True), split=5)),
        Choice(193, 512, Variant(Tile(128, 128, 128, 8, 3, swap=True), split=5)),
    ),
    Shape("plain", 1536, 151936, e4m3=True): (
        Choice(2, 16, Variant(Tile(16, 32, 256, 4, 4))),
        Choice(17, 32, Variant(Tile(32, 64, 256, 4, 4, swap=True))),
    ),
    Shape("plain", 3584, 4608, e4m3=True): (
        Choice(2, 16, Variant(Tile(16, 64, 256, 4, 4, swap=True))),
        Choice(17, 32, Variant(Tile(32, 64, 128, 4, 8, swap=True))),
        Choice(65, 192, Variant(Tile(64, 64, 128, 4, 6, tma=True), eight_bit=True)),
    ),
    Shape("add_norm", 3584, 3584, e4m3=True): (
        Choice(2, 16, Variant(Tile(16, 64, 256, 4, 4, swap=True), split=2)),
        Choice(17, 32, Variant(Tile(32, 64, 256, 4, 4, swap=True), split=2)),
        Choice(65, 192, Variant(Tile(64, 64, 128, 4, 4, swap=True), split=2)),
    ),
    Shape("silu_mul", 3584, 18944, e4m3=True): (
        Choice(2, 16, Variant(Tile(16, 32, 256, 4, 4))),
        Choice(17, 32, Variant(Tile(32, 64, 256, 4, 4, swap=True))),
        Choice(65, 192, Variant(Tile(128, 64, 128, 4, 4, tma=True), eight_bit=True)),
        Choice(193, 512, Variant(Tile(128, 128, 128, 8, 4, tma=True), eight_bit=True)),
    ),
    Shape("add_norm", 18944, 3584, e4m3=True): (
        Choice(2, 16, Variant(Tile(16, 64, 128, 4, 8, swap=True), split=4)),
        Choice(17, 32, Variant(Tile(32, 64, 256, 4, 4, swap=True), split=2)),
        Choice(65, 192, Variant(Tile(128, 128, 128, 8, 3, swap=True), split=4)),
    ),
    Shape("plain", 3584, 152064, e4m3=True): (
        Choice(2, 16, Variant(Tile(16, 64, 256, 4, 4, swap=True))),
        Choice(17, 32, Variant(Tile(32, 64, 256, 4, 4, swap=True))),
    ),
}

SM_90_E4M3_BLOCKS: Mapping[Shape, Blocks] = {
    Shape("plain", 1536, 2048, e4m3=True): Blocks(8, 256, 8),
    Shape("plain", 1536, 1536, e4m3=True): Blocks(4, 1024, 8),
    Shape("silu_mul", 1536, 8960, e4m3=True): Blocks(8, 256, 4),
    Shape("plain", 8960, 1536, e4m3=True): Blocks(2, 512, 2),
    Shape("plain", 1536, 151936, e4m3=True): Blocks(8, 256, 4),
    Shape("plain", 3584, 4608, e4m3=True): Blocks(4, 1024, 8),
    Shape("plain", 3584, 3584, e4m3=True): Blocks(8, 256, 4),
    Shape("silu_mul", 3584, 18944, e4m3=True): Blocks(16, 256, 4),
    Shape("plain", 18944, 3584, e4m3=True): Blocks(2, 512, 2),
    Shape("plain", 3584, 152064, e4m3=True): Blocks(2, 512, 2),
}

SM_90_E4M3_COPIES: Mapping[tuple[int, int], int] = {
    (8960, 1536): 193,
}
