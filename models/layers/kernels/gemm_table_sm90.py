"""GEMM configurations measured on an H100, for every GPU of compute capability 9.0.

`python -m benchmarks.kernels.choose` writes it from the results of `python -m benchmarks.kernels gemms`.
"""

from __future__ import annotations

from models.layers.kernels.gemm_types import Choice, Shape, Table, Tile, Variant

SM_90: Table = {
    Shape("plain", 1024, 2560): (
        Choice(129, 176, Variant(Tile(64, 64, 128, 4, 4, tma=True))),
        Choice(177, 352, Variant(Tile(128, 128, 64, 8, 4, tma=True))),
        Choice(353, 704, Variant(Tile(128, 128, 64, 8, 4))),
        Choice(705, 1408, Variant(Tile(128, 256, 64, 8, 3, tma=True))),
    ),
    Shape("add_norm", 2048, 1024): (
        Choice(129, 176, Variant(Tile(64, 64, 128, 4, 4, tma=True), split=2)),
        Choice(177, 352, Variant(Tile(64, 64, 128, 4, 4, tma=True), deferred=True)),
        Choice(353, 704, Variant(Tile(128, 128, 64, 8, 4), split=2)),
    ),
    Shape("add_norm", 4096, 1024): (
        Choice(129, 176, Variant(Tile(64, 64, 128, 4, 4, tma=True), split=2)),
        Choice(177, 352, Variant(Tile(128, 128, 64, 8, 4), split=4)),
        Choice(353, 704, Variant(Tile(128, 128, 64, 8, 4, tma=True), split=2)),
    ),
    Shape("silu_mul", 1024, 4096): (
        Choice(177, 352, Variant(Tile(128, 128, 64, 8, 3, tma=True))),
        Choice(705, 1408, Variant(Tile(128, 128, 64, 8, 4, tma=True))),
    ),
    Shape("plain", 2048, 2560): (
        Choice(2, 8, Variant(Tile(16, 64, 128, 4, 6, swap=True))),
        Choice(9, 16, Variant(Tile(16, 64, 128, 4, 6, swap=True))),
        Choice(17, 32, Variant(Tile(32, 64, 128, 4, 6, swap=True))),
        Choice(33, 64, Variant(Tile(64, 32, 128, 4, 6, tma=True))),
        Choice(65, 128, Variant(Tile(64, 64, 128, 4, 4, tma=True))),
    ),
    Shape("add_norm", 2048, 2048): (
        Choice(2, 8, Variant(Tile(16, 64, 128, 4, 6, swap=True), split=4)),
        Choice(9, 16, Variant(Tile(16, 64, 128, 4, 6, swap=True), deferred=True)),
        Choice(17, 32, Variant(Tile(32, 32, 128, 4, 6), split=2)),
        Choice(65, 128, Variant(Tile(64, 64, 128, 4, 4, tma=True), split=2)),
    ),
    Shape("silu_mul", 2048, 6144): (
        Choice(2, 8, Variant(Tile(16, 128, 64, 4, 4, swap=True))),
        Choice(9, 16, Variant(Tile(16, 64, 128, 4, 3, swap=True, tma=True))),
        Choice(17, 32, Variant(Tile(32, 64, 128, 4, 3, swap=True))),
        Choice(33, 64, Variant(Tile(64, 64, 128, 4, 3, swap=True, tma=True))),
        Choice(65, 128, Variant(Tile(128, 64, 64, 8, 4, tma=True))),
        Choice(129, 256, Variant(Tile(128, 128, 64, 8, 4, tma=True))),
    ),
    Shape("add_norm", 6144, 2048): (
        Choice(2, 8, Variant(Tile(16, 64, 128, 4, 4, swap=True), split=4)),
        Choice(9, 16, Variant(Tile(16, 64, 128, 4, 4, swap=True), split=4)),
        Choice(17, 32, Variant(Tile(32, 64, 128, 4, 4, swap=True), split=4)),
        Choice(33, 64, Variant(Tile(64, 32, 128, 4, 6, tma=True), split=2)),
        Choice(65, 128, Variant(Tile(64, 64, 128, 4, 4, tma=True), split=2)),
    ),
    Shape("plain", 1536, 2048): (
        Choice(2, 8, Variant(Tile(16, 64, 128, 4, 6, swap=True))),
        Choice(9, 16, Variant(Tile(16, 64, 128, 4, 6, swap=True))),
        Choice(17, 32, Variant(Tile(32, 64, 128, 4, 6, swap=True))),
        Choice(33, 64, Variant(Tile(64, 16, 256, 4, 4, tma=True))),
        Choice(65, 128, Variant(Tile(64, 64, 128, 4, 4, tma=True))),
    ),
    Shape("add_norm", 1536, 1536): (
        Choice(2, 8, Variant(Tile(16, 64, 128, 4, 6, swap=True), deferred=True)),
        Choice(9, 16, Variant(Tile(16, 64, 128, 4, 6, swap=True), deferred=True)),
        Choice(17, 32, Variant(Tile(32, 64, 128, 4, 6, swap=True), deferred=True)),
        Choice(33, 64, Variant(Tile(64, 16, 256, 4, 4, tma=True), split=2)),
        Choice(65, 128, Variant(Tile(64, 64, 128, 4, 4, tma=True), deferred=True)),
    ),
    Shape("silu_mul", 1536, 8960): (
        Choice(2, 8, Variant(Tile(16, 32, 128, 4, 4))),
        Choice(9, 16, Variant(Tile(16, 32, 128, 4, 4))),
        Choice(17, 32, Variant(Tile(32, 32, 128, 4, 4, tma=True))),
        Choice(33, 64, Variant(Tile(64, 32, 128, 4, 4, tma=True))),
        Choice(65, 128, Variant(Tile(128, 128, 64, 8, 4))),
        Choice(257, 512, Variant(Tile(128, 128, 64, 8, 4, tma=True))),
    ),
    Shape("add_norm", 8960, 1536): (
        Choice(2, 8, Variant(Tile(16, 64, 128, 4, 6, swap=True), split=5)),
        Choice(9, 16, Variant(Tile(16, 64, 128, 4, 6, swap=True), split=5)),
        Choice(33, 64, Variant(Tile(64, 32, 128, 4, 6, tma=True), split=2)),
        Choice(65, 128, Variant(Tile(128, 64, 64, 4, 4, tma=True), split=5)),
    ),
    Shape("quick_gelu", 1280, 5120): (Choice(1025, 4096, Variant(Tile(128, 256, 64, 8, 3, tma=True))),),
}
