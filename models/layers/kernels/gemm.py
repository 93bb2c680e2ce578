"""GEMMs on a GPU: which kernel makes them, by the first rule of their kind that takes their shape, else cuBLAS with
kernels around it.

A measured shape takes the configuration of the table (models.layers.kernels.gemm_configs); one row is a GEMV; few rows
are streamed in a tile of their own; many rows with a gate behind them go to persistent programs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from models.layers.gemm import Epilogue
from models.layers.kernels import e4m3
from models.layers.kernels.elementwise import silu_mul
from models.layers.kernels.gemm_configs import (
    active,
    config_for,
    e4m3_tile,
    fitted,
    in_sixteen_bits,
    streaming_tile,
    table_of,
)
from models.layers.kernels.gemm_lora import takes_lora
from models.layers.kernels.gemm_types import Kind, Tile, Variant
from models.layers.kernels.gemv import gemv, is_vector, vector_gemm
from models.layers.kernels.gpu import current_gpu
from models.layers.kernels.lora import add_lora
from models.layers.kernels.norms import add_rms_norm, rms_norm
from models.layers.kernels.packed import add_quick_gelu
from models.layers.kernels.persistent_gemm import persistent_gemm
from models.layers.kernels.persistent_gemm import takes as takes_persistent
from models.layers.kernels.tiled_gemm import gemm_add_deferred_norm, split_gemm_add_norm, tiled_gemm
from models.layers.lora import GemmLora
from models.layers.norms import DeferredNorm, Normed, VectorNorm
from models.layers.quantized import MOST_STREAMED, QuantizedWeight, Weight, for_rows, kernels_take

BLOCK_K = 128
_SMALL_WEIGHT = 8192 * 1024
"""The largest of VoxCPM2's local stacks: up to here 128 rows were measured, beyond it 64."""
_MOST_STREAMED_E4M3 = 64
"""Rows of 16 bits that a weight in e4m3 meets; more are in e4m3 themselves."""
_VOCABULARY = 1 << 16
"""Outputs from which a layer is taken for a head over a vocabulary."""
_MOST_VECTORS = 64
"""Rows that each read a narrow weight for themselves."""
_LORA_TILE = Tile(128, 128, 64, warps=8, stages=4, tma=True)
"""For the output projection of VoxCPM2's LocDiT with adapters. Alone cuBLAS and a norm are faster, 14.0 us for 15.2 at
1,408 rows (benchmarks/results/kernels/gemms.json), but adapters would take another kernel."""
_LORA_SHAPE, _LORA_ROWS = (1024, 2048), (705, 1408)
"""Its weight, and rows for which the gated GEMM behind it, which then scales by the norm, is in the table."""
_NARROW_TILE = Tile(16, 16, BLOCK_K, warps=2, stages=6)
"""For hundreds of rows of some 64 columns, which larger tiles give to a few thread blocks."""


class Way(NamedTuple):
    """How a GEMM is made: by which kernel, and with which tile (None: that of few rows) or measured variant."""

    kernel: Literal["gemv", "tiled", "persistent", "cublas", "eight_bit"]
    tile: Tile | None = None
    variant: Variant | None = None

    @property
    def quantises_rows(self) -> bool:
        """Whether a measured variant of the tiled kernel reads x in e4m3."""
        return self.variant is not None and self.variant.eight_bit


Rule = Callable[[Kind, Tensor, Weight], Way | None]
"""x [..., K] and weight [N, K] of a GEMM of this kind -> its way, None for the next rule to decide."""


def one_vector(kind: Kind, x: Tensor, weight: Weight) -> Way | None:
    """A single row."""
    return Way("gemv") if is_vector(x) and kernels_take(weight) else None


def measured(kind: Kind, x: Tensor, weight: Weight) -> Way | None:
    """A shape that the table of this GPU names."""
    chosen = config_for(kind, x, weight)
    return Way("tiled", chosen.tile, chosen) if chosen else None


def streamed(kind: Kind, x: Tensor, weight: Weight) -> Way | None:
    """Few rows, with an epilogue."""
    return Way("tiled") if streams(x, weight) else None


def streamed_alone(kind: Kind, x: Tensor, weight: Weight) -> Way | None:
    """Few rows. Without an epilogue to gain from, cuBLAS is faster at the larger weights (Qwen2-VL-7B's qkv)."""
    return Way("tiled") if weight.numel() <= _SMALL_WEIGHT and streams(x, weight) else None


def vocabulary(kind: Kind, x: Tensor, weight: Weight) -> Way | None:
    """Few rows to logits, which read hundreds of megabytes: 8 rows of Qwen2-VL-2B take 157 us, with cuBLAS 170. None
    where cuBLAS is as fast or the tiles do not fit."""
    rows = x.numel() // x.shape[-1]
    if weight.shape[0] < _VOCABULARY or weight.shape[0] % 64 or rows > 64 or not streams(x, weight):
        return None
    if rows > 32:
        return Way("tiled", fitted(Tile(64, 64, BLOCK_K, warps=4, stages=4, tma=True)))
    return Way("tiled", fitted(Tile(16 if rows <= 16 else 32, 64, BLOCK_K, warps=4, stages=6, swap=True)))


def persistent(kind: Kind, x: Tensor, weight: Weight) -> Way | None:
    """Many rows, with a gate behind them."""
    return Way("persistent") if not isinstance(weight, QuantizedWeight) and takes_persistent(x, weight) else None


def streamed_e4m3(kind: Kind, x: Tensor, weight: Weight) -> Way | None:
    """Few rows, as `streamed` of a weight of 16 bits; any number where tensor cores do not multiply e4m3."""
    rows = x.numel() // x.shape[-1]
    gated = kind == "silu_mul"
    if not rows or x.dtype not in (torch.bfloat16, torch.float16) or not kernels_take(weight):
        return None
    by_group = isinstance(weight, QuantizedWeight) and not weight.per_output
    most = MOST_STREAMED if by_group else _MOST_STREAMED_E4M3 if e4m3.has_e4m3() else rows
    if weight.shape[0] % (128 if gated else 64) or rows > most:
        return None
    tile = e4m3_tile(rows, gated=gated)
    if by_group and tile.rows > 64:  # it has two sets of sums
        tile = replace(tile, warps=8)
    if by_group and kind == "plain" and rows <= 16 and weight.shape[0] // tile.columns < current_gpu().num_sms:
        tile = replace(tile, columns=32, warps=2, stages=4)
    return Way("tiled", tile)


def streamed_vector(kind: Kind, x: Tensor, weight: Weight) -> Way | None:
    """A single row and codes with groups, where the table has it. Else a GEMV of gated outputs in 8 bits takes half as
    long again, but it reads a narrow weight without an epilogue sooner."""
    if not isinstance(weight, QuantizedWeight) or weight.per_output or not is_vector(x):
        return None
    streamed = kind != "plain" and weight.scheme.codes != "u4"
    return measured(kind, x, weight) or (streamed_e4m3(kind, x, weight) if streamed else None)


def eight_bit(kind: Kind, x: Tensor, weight: Weight) -> Way | None:
    """Many rows: activations in e4m3, too, where tensor cores multiply it."""
    rows = x.numel() // x.shape[-1]
    if not isinstance(weight, QuantizedWeight) or not weight.per_output:
        return None
    fits = x.dtype == torch.bfloat16 and e4m3.has_e4m3() and kernels_take(weight) and weight.shape[0] % 16 == 0
    return Way("eight_bit") if fits and rows > _MOST_STREAMED_E4M3 else None


RULES: Mapping[Kind, tuple[Rule, ...]] = {
    "plain": (one_vector, measured, streamed_alone, vocabulary),
    "silu_mul": (one_vector, measured, streamed, persistent),
    "quick_gelu": (measured,),
    "add_norm": (one_vector, measured, streamed),
}


E4M3_RULES: tuple[Rule, ...] = (streamed_vector, one_vector, measured, streamed_e4m3, eight_bit)
"""Of a weight that is held as codes; where none holds, it is dequantised."""


def way_of(kind: Kind, x: Tensor, weight: Weight) -> Way:
    """The way of the first rule that holds, else cuBLAS."""
    for rule in E4M3_RULES if isinstance(weight, QuantizedWeight) else RULES[kind]:
        if way := rule(kind, x, weight):
            return way
    return Way("cublas")


def gemm(
    x: Normed, weight: Weight, bias: Tensor | None = None, epilogue: Epilogue = "", lora: GemmLora | None = None
) -> Tensor:
    """models.layers.gemm.gemm."""
    if lora is not None:
        return _adapted_gemm(x, weight, bias, lora)
    kind: Kind = epilogue or "plain"
    if isinstance(x, VectorNorm):
        if way_of(kind, x.rows, weight).kernel == "gemv":
            return vector_gemm(x.rows, weight, bias, norm=(x.weight, x.eps), silu_mul=epilogue == "silu_mul")
        x = x.normed()
    plain = x.rows if isinstance(x, DeferredNorm) else x
    rows = plain.numel() // plain.shape[-1]
    weight = for_rows(weight, rows)
    if isinstance(x, DeferredNorm):
        chosen = config_for(kind, x.rows, weight)
        if chosen is None and isinstance(weight, QuantizedWeight):
            chosen = Variant(e4m3_tile(rows, gated=kind == "silu_mul"))
        tile = chosen.tile if chosen else None
        x = x._replace(rows=e4m3.in_order(x.rows, weight))
        return tiled_gemm(x, weight, bias, tile, epilogue, eight_bit=chosen is not None and chosen.eight_bit)
    way = way_of(kind, x, weight)
    if way.kernel == "gemv":
        return vector_gemm(x, weight, bias, silu_mul=epilogue == "silu_mul")
    x = e4m3.in_order(x, weight)
    if way.kernel == "tiled":
        split = way.variant.split if way.variant is not None else 1
        return tiled_gemm(x, weight, bias, way.tile, epilogue, split=split, eight_bit=way.quantises_rows)
    if way.kernel == "persistent" and not isinstance(weight, QuantizedWeight):
        return persistent_gemm(x, weight, bias)
    if epilogue == "quick_gelu":
        if bias is None:
            raise ValueError("gemm: the quick GELU's kernel needs a bias")
        return add_quick_gelu(_plain_gemm(way, x, weight), bias)
    y = _plain_gemm(way, x, weight, bias)
    return silu_mul(y) if epilogue == "silu_mul" else y


def _adapted_gemm(x: Normed, weight: Weight, bias: Tensor | None, lora: GemmLora) -> Tensor:
    """gemm with adapters, in its kernel where that is a tiled one."""
    if isinstance(x, VectorNorm):
        x = x.normed()
    rows = x.rows if isinstance(x, DeferredNorm) else x
    way = way_of("plain", rows, weight)
    if not isinstance(weight, QuantizedWeight) and (way.kernel == "tiled" or isinstance(x, DeferredNorm)):
        tile = way.tile or streaming_tile(rows.numel() // rows.shape[-1])
        if takes_lora(lora, tile):
            return tiled_gemm(x, weight, bias, tile, lora=lora)
    return add_lora(gemm(x, weight, bias), x, lora.pair, lora.rows)


def _plain_gemm(way: Way, x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """x times a weight, and nothing else in the kernel."""
    if not isinstance(weight, QuantizedWeight):
        return F.linear(x, weight, bias)
    if way.kernel == "eight_bit":
        return e4m3.eight_bit_gemm(x, weight, bias)
    if weight.per_output or x.dtype == torch.float32:
        return F.linear(x, weight.dequantised(x.dtype), bias)
    return F.linear(x, e4m3.dequantise(weight, x.dtype), bias)


def narrow_gemm(x: Normed, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """models.layers.gemm.narrow_gemm."""
    if not isinstance(x, Tensor) or isinstance(weight, QuantizedWeight):
        return gemm(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[0] <= _MOST_VECTORS:
        return gemv(rows, weight, bias).view(*x.shape[:-1], -1)
    fits = weight.shape[1] % _NARROW_TILE.depth == 0 and weight.shape[0] % _NARROW_TILE.columns == 0
    if fits and in_sixteen_bits(rows, weight):
        return tiled_gemm(x, weight, bias, fitted(_NARROW_TILE))
    return F.linear(x, weight, bias)


def gemm_add_norm(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None,
    residual: Tensor,
    norm_weight: Tensor,
    eps: float,
    lora: GemmLora | None = None,
    *,
    deferrable: bool = False,
) -> tuple[Normed, Tensor]:
    """models.layers.gemm.gemm_add_norm. If it may be, the norm is made by the GEMVs that read a single row, and
    deferred where that was measured to be faster."""
    weight = for_rows(weight, x.numel() // x.shape[-1])
    way = way_of("add_norm", x, weight)
    if way.kernel == "gemv":
        total = vector_gemm(x, weight, bias, residual=residual)
        if lora is not None:
            add_lora(total, x, lora.pair, lora.rows)
        elif deferrable and norm_weight.dtype == x.dtype:
            return VectorNorm(total, norm_weight, eps), total
        return rms_norm(total, norm_weight, eps), total
    if deferrable and lora is not None and way.kernel == "cublas" and _tiled_with_lora(x, weight, lora):
        way = Way("tiled", _LORA_TILE, Variant(_LORA_TILE, deferred=True))
    if lora is not None and not _takes_lora(way, x, lora):
        # The residual plus what the adapters add.
        residual = add_lora(residual.clone(memory_format=torch.contiguous_format), x, lora.pair, lora.rows)
        lora = None
    x = e4m3.in_order(x, weight)
    after = residual, norm_weight, eps
    if way.kernel in ("cublas", "eight_bit"):
        return add_rms_norm(_plain_gemm(way, x, weight, bias), *after)
    if way.variant is not None and way.variant.deferred:
        made = gemm_add_deferred_norm(x, weight, bias, *after, way.tile, eight_bit=way.quantises_rows, lora=lora)
        return made if deferrable else (rms_norm(made[1], norm_weight, eps), made[1])
    split = way.variant.split if way.variant is not None else None
    return split_gemm_add_norm(
        x, weight, bias, *after, split=split, tile=way.tile, eight_bit=way.quantises_rows, lora=lora
    )


def _tiled_with_lora(x: Tensor, weight: Weight, lora: GemmLora) -> bool:
    """Whether _LORA_TILE makes a GEMM with adapters that cuBLAS makes without them: as measured on an H100."""
    least, most = _LORA_ROWS
    return (
        not isinstance(weight, QuantizedWeight)
        and weight.shape == _LORA_SHAPE
        and least <= x.numel() // x.shape[-1] <= most
        and in_sixteen_bits(x, weight)
        and active() is table_of(current_gpu())
        and takes_lora(lora, _LORA_TILE)
    )


def _takes_lora(way: Way, x: Tensor, lora: GemmLora) -> bool:
    tile = way.tile or streaming_tile(x.numel() // x.shape[-1])
    return way.kernel == "tiled" and not way.quantises_rows and takes_lora(lora, tile)


def streams(x: Tensor, weight: Weight) -> bool:
    """Whether a stack of layers is faster with the kernels here than with cuBLAS (benchmarks/results/kernels)."""
    rows = x.numel() // x.shape[-1]
    return (
        not isinstance(weight, QuantizedWeight)
        and 0 < rows <= (128 if weight.numel() <= _SMALL_WEIGHT else 64)
        and in_sixteen_bits(x, weight)
        and weight.shape[1] % BLOCK_K == 0
        and weight.shape[0] % 64 == 0
    )
