"""Which configuration of the GEMM kernel a layer takes: by a table that was measured on this kind of GPU, else by rule.

Measured is an H100 (models.layers.kernels.gemm_tables). A GEMM that no table names goes by the rules of
models.layers.kernels.gemm: one vector by a kernel of its own, few rows streamed in a tile that is cut down until it
fits the GPU, more rows by cuBLAS with kernels around it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

import torch
from torch import Tensor

from models.layers.kernels.gemm_tables import SM_90, SM_90_CODES, SM_90_CODES_BLOCKS, SM_90_E4M3, SM_90_E4M3_BLOCKS
from models.layers.kernels.gemm_types import Blocks, Kind, Shape, Table, Tile, Variant
from models.layers.kernels.gpu import Gpu, current_gpu
from models.layers.quantized import GROUP, QuantizedWeight, Weight

_VALUE_BYTES = 2
"""Bytes of a value of the operands: bfloat16 and float16."""
_DEPTH = 128
_BESIDE_TILES = 2048
"""Shared memory that a program asks for beside its tiles: barriers, and what sums across warps goes through."""
_used: Table | None = None


@contextmanager
def using(table: Table) -> Iterator[None]:
    """In this context GEMMs take their configurations from `table`, not from the one that belongs to the GPU."""
    global _used
    before, _used = _used, table
    try:
        yield
    finally:
        _used = before


@cache
def table_of(gpu: Gpu) -> Table:
    """What was measured on this kind of GPU; empty where nothing was."""
    return SM_90 if gpu.capability == (9, 0) else {}


@cache
def e4m3_table_of(gpu: Gpu) -> Table:
    """table_of, of weights that are held as codes."""
    return {**SM_90_E4M3, **SM_90_CODES} if gpu.capability == (9, 0) else {}


def active() -> Table:
    """What `config_for` reads of weights of 16 bits."""
    return _used if _used is not None else table_of(current_gpu())


def in_sixteen_bits(x: Tensor, weight: Tensor) -> bool:
    """Whether both are of one dtype of 16 bits, and the weight's rows are contiguous."""
    return x.dtype in (torch.bfloat16, torch.float16) and weight.dtype == x.dtype and weight.stride(1) == 1


def config_for(kind: Kind, x: Tensor, weight: Weight) -> Variant | None:
    """The measured choice for x [..., K] times weight [N, K], None where the rules hold."""
    if x.dtype not in (torch.bfloat16, torch.float16):
        return None
    e4m3, codes = isinstance(weight, QuantizedWeight), ""
    if isinstance(weight, QuantizedWeight) and not weight.per_output:
        if weight.scale.shape[-1] * GROUP > weight.shape[1]:
            return None
        e4m3, codes = False, weight.scheme.codes
    if not isinstance(weight, QuantizedWeight) and (weight.dtype != x.dtype or weight.stride(1) != 1):
        return None
    outputs = weight.shape[0] // (2 if kind == "silu_mul" else 1)
    rows = x.numel() // x.shape[-1]
    table = e4m3_table_of(current_gpu()) if e4m3 or codes else active()
    for choice in table.get(Shape(kind, weight.shape[1], outputs, e4m3, codes), ()):
        if choice.least <= rows <= choice.most:
            return choice.variant
    return None


def shared_memory_of(tile: Tile, gpu: Gpu, *, gated: bool = False) -> int:
    """Bytes of shared memory that a program of this tile asks for, at the most: its stages of both operands, or, after
    them, the results on their way to the layout that they are stored in. gated: two weights (SiLU of one half)."""
    columns = tile.columns * (2 if gated else 1)
    stages = max(1, tile.stages - gpu.copies_one_stage_fewer)
    operands = (tile.rows + columns) * tile.depth * _VALUE_BYTES * stages
    results = tile.rows * columns * 4
    return max(operands, results) + _BESIDE_TILES


def fits(tile: Tile, gpu: Gpu, *, gated: bool = False) -> bool:
    """Whether the GPU has the shared memory, and TMA if the tile wants it."""
    return shared_memory_of(tile, gpu, gated=gated) <= gpu.shared_memory and (gpu.has_tma or not tile.tma)


@cache
def fitted_for(tile: Tile, gpu: Gpu, *, gated: bool = False) -> Tile:
    """The tile as this GPU can run it: without TMA where there is none, with as many stages as fit, of half
    the depth where two do not."""
    if tile.tma and not gpu.has_tma:
        tile = replace(tile, tma=False)
    while not fits(tile, gpu, gated=gated) and tile.stages > 2:
        tile = replace(tile, stages=tile.stages - 1)
    if not fits(tile, gpu, gated=gated) and tile.depth > 32:
        return fitted_for(replace(tile, depth=tile.depth // 2), gpu, gated=gated)
    return tile


def fitted(tile: Tile, *, gated: bool = False) -> Tile:
    """fitted_for of the current GPU."""
    return fitted_for(tile, current_gpu(), gated=gated)


def streaming_tile(rows: int, *, gated: bool = False) -> Tile:
    """A tile for few rows: what most shapes in the table take, of two sizes, so that few kernels are compiled."""
    if rows > 64:
        return fitted(Tile(128, 32, _DEPTH, stages=4), gated=gated)
    least = 16 if rows <= 16 else 64
    return fitted(
        Tile(least, 32, _DEPTH, stages=4) if gated else Tile(least, 64, _DEPTH, stages=6, swap=True), gated=gated
    )


def e4m3_tile(rows: int, *, gated: bool = False) -> Tile:
    """A tile for a weight that is held as codes, which is converted in registers, the tensor cores' first operand."""
    if rows > 64 and not gated:
        return fitted(Tile(128, 64, _DEPTH, stages=4, swap=True))
    least = min(64, max(16, 1 << (rows - 1).bit_length()))
    return fitted(Tile(least, 64, _DEPTH, stages=4 if gated else 6, swap=True), gated=gated)


def e4m3_blocks(inputs: int, outputs: int, *, gated: bool = False) -> Blocks:
    """Blocks of the GEMV with a weight in e4m3: as measured on this GPU, else so that it has two programs and more for
    each multiprocessor (benchmarks/results/kernels/e4m3_*.json: within a ninth of the best everywhere)."""
    measured = measured_blocks(Shape("silu_mul" if gated else "plain", inputs, outputs, True))
    return measured or Blocks(8 if outputs >= 16 * current_gpu().num_sms else 4, 256)


def measured_blocks(shape: Shape) -> Blocks | None:
    """Of the GEMV with a weight that is held as codes, None where the rules hold."""
    measured = {**SM_90_E4M3_BLOCKS, **SM_90_CODES_BLOCKS}.get(shape)
    return measured if current_gpu().capability == (9, 0) else None


def default_split(width: int, inputs: int, columns: int, *, codes: bool = False) -> int:
    """Split-K partitions so that tiles of `columns` fill the GPU about once. codes: with scales of groups, whose tiles
    wait for themselves: five for each multiprocessor, each of three blocks of inputs or more, the last may be short."""
    if codes:
        blocks = inputs // _DEPTH
        most = max(1, min(5 * current_gpu().num_sms * columns // width, blocks // 3))
        return -(-blocks // -(-blocks // most))
    splits = [split for split in range(1, 9) if inputs % (split * _DEPTH) == 0]
    return min(splits, key=lambda split: abs(split * width // columns - current_gpu().num_sms))
