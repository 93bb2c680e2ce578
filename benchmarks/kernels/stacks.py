"""Whole stacks of transformer layers, as they run inside a decode step: LocDiT (11 positions, two rows a stream), and
the language models over a paged cache. Variants: plain PyTorch, fused kernels around cuBLAS, streamed weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.timing import Case
from models.layers.attention import paged_decode_attention, rotary_paged_decode_attention
from models.layers.fused import rotary_dense_attention, silu_mul
from models.layers.kernels import elementwise, norms, rotary, tiled_gemm
from models.layers.kernels.gemm_types import Tile
from models.layers.norms import rms_norm
from models.layers.rotary import rotate_half_split
from service.tuning.timer import Run

EPS = 1e-5
Attend = Callable[[Tensor, int], Tensor]
"""qkv [rows, (heads + 2 kv heads) * head_dim] and the layer -> [rows, heads * head_dim]."""


@dataclass(frozen=True)
class Layer:
    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor
    attention_norm: Tensor
    mlp_norm: Tensor


@dataclass(frozen=True)
class Shape:
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    layers: int


LOCDIT = Shape(1024, 4096, 16, 2, 12)
TSLM = Shape(2048, 6144, 16, 2, 28)
QWEN2B = Shape(1536, 8960, 12, 2, 28)
QWEN7B = Shape(3584, 18944, 28, 4, 4)


def _layers(shape: Shape) -> list[Layer]:
    def random(rows: int, inputs: int) -> Tensor:
        return torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16) * inputs**-0.5

    attended = shape.heads * 128
    qkv = attended + 2 * shape.kv_heads * 128
    norm = torch.ones(shape.hidden_size, device="cuda", dtype=torch.bfloat16)
    return [
        Layer(
            random(qkv, shape.hidden_size), random(shape.hidden_size, attended),
            random(2 * shape.intermediate_size, shape.hidden_size), random(shape.hidden_size, shape.intermediate_size),
            norm, norm,
        )
        for _ in range(shape.layers)
    ]  # fmt: skip


def _plain(x: Tensor, layers: list[Layer], attend: Attend) -> Tensor:
    for index, layer in enumerate(layers):
        x = x + F.linear(
            attend(F.linear(rms_norm.reference(x, layer.attention_norm, EPS), layer.qkv), index), layer.out
        )
        x = x + F.linear(
            silu_mul.reference(F.linear(rms_norm.reference(x, layer.mlp_norm, EPS), layer.gate_up)), layer.down
        )
    return x


def _fused(x: Tensor, layers: list[Layer], attend: Attend) -> Tensor:
    normed = norms.rms_norm(x, layers[0].attention_norm, EPS)
    for index, layer in enumerate(layers):
        attended = F.linear(attend(F.linear(normed, layer.qkv), index), layer.out)
        normed, x = norms.add_rms_norm(attended, x, layer.mlp_norm, EPS)
        hidden = elementwise.silu_mul(F.linear(normed, layer.gate_up))
        normed, x = norms.add_rms_norm(F.linear(hidden, layer.down), x, layer.attention_norm, EPS)
    return normed


def _stream(x: Tensor, layers: list[Layer], attend: Attend, tile: Tile | None = None) -> Tensor:
    normed = norms.rms_norm(x, layers[0].attention_norm, EPS)
    for index, layer in enumerate(layers):
        attended = attend(tiled_gemm.tiled_gemm(normed, layer.qkv, None, tile), index)
        normed, x = tiled_gemm.split_gemm_add_norm(attended, layer.out, None, x, layer.mlp_norm, EPS, tile=tile)
        hidden = tiled_gemm.tiled_gemm(normed, layer.gate_up, None, tile, "silu_mul")
        normed, x = tiled_gemm.split_gemm_add_norm(hidden, layer.down, None, x, layer.attention_norm, EPS, tile=tile)
    return normed


def _mixed(x: Tensor, layers: list[Layer], attend: Attend) -> Tensor:
    """cuBLAS for qkv, the rest streamed."""
    normed = norms.rms_norm(x, layers[0].attention_norm, EPS)
    for index, layer in enumerate(layers):
        attended = attend(F.linear(normed, layer.qkv), index)
        normed, x = tiled_gemm.split_gemm_add_norm(attended, layer.out, None, x, layer.mlp_norm, EPS)
        hidden = tiled_gemm.tiled_gemm(normed, layer.gate_up, epilogue="silu_mul")
        normed, x = tiled_gemm.split_gemm_add_norm(hidden, layer.down, None, x, layer.attention_norm, EPS)
    return normed


VARIANTS: dict[str, Callable[[Tensor, list[Layer], Attend], Tensor]] = {
    "plain": _plain,
    "fused": _fused,
    "stream": _stream,
    "stream 32x128x4": partial(_stream, tile=Tile(64, 32, 128, stages=4)),
    "stream 32x256x3": partial(_stream, tile=Tile(64, 32, 256, stages=3)),
    "stream 64x128x4": partial(_stream, tile=Tile(64, 64, 128, stages=4)),
    "mixed": _mixed,
}


def _locdit(streams: int, variant: str) -> Run:
    layers = _layers(LOCDIT)
    rows = 2 * streams
    x = torch.randn(rows * 11, 1024, device="cuda", dtype=torch.bfloat16)
    cos, sin = torch.randn(11, 64, device="cuda"), torch.randn(11, 64, device="cuda")

    def attend(qkv: Tensor, layer: int) -> Tensor:
        q, k, v = qkv.view(rows, 11, 20, 128).split((16, 2, 2), dim=2)
        if variant == "plain":
            return rotary_dense_attention.reference(q, k, v, cos, sin, 0).reshape(rows * 11, -1)
        return rotary.rotary_dense_attention(q, k, v, cos, sin, 0).view(rows * 11, -1)

    return lambda i: VARIANTS[variant](x, layers, attend)


def _lm(shape: Shape, rows: int, length: int, variant: str) -> Run:
    layers = _layers(shape)
    page, pages = 16, length // 16 + 1
    x = torch.randn(rows, shape.hidden_size, device="cuda", dtype=torch.bfloat16)
    cache = torch.randn(2, (rows * pages + 1) * page, shape.kv_heads, 128, device="cuda", dtype=torch.bfloat16)
    tables = (torch.randperm(rows * pages, device="cuda").int() + 1).view(rows, pages)
    lengths = torch.full((rows,), length, device="cuda", dtype=torch.int32)
    slots = tables[:, (length - 1) // page].long() * page + (length - 1) % page
    cos, sin = torch.randn(rows, 64, device="cuda"), torch.randn(rows, 64, device="cuda")

    def attend(qkv: Tensor, layer: int) -> Tensor:
        heads = qkv.view(rows, -1, 128)
        q, k, v = heads.split((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)
        if variant == "plain":
            q, k = rotate_half_split(q, cos, sin), rotate_half_split(k, cos, sin)
            cache[0].index_copy_(0, slots, k)
            cache[1].index_copy_(0, slots, v)
            return paged_decode_attention(q, cache[0], cache[1], tables, lengths, page).flatten(1)
        rotated = (q, k, v, (cos, sin), cache[0], cache[1], slots)
        return rotary_paged_decode_attention(*rotated, tables, lengths, page).flatten(1)

    return lambda i: VARIANTS[variant](x, layers, attend)


def cases() -> list[Case]:
    found = []
    for streams in (1, 2, 4, 8, 32, 64):
        for variant in VARIANTS:
            if variant not in ("plain", "fused") and streams > 5:
                continue
            make = lambda a=(streams, variant): _locdit(*a)  # noqa: E731
            weights, flops = 17.3e6 * 12, 2 * 17.3e6 * 12 * 22 * streams
            floor = max(weights * 2 / 3.0e6, flops / 7.0e8)
            found.append(Case("LocDiT stack", f"{streams} streams", variant, make, round(floor, 1), calls=3))
    for name, shape, parameters in (
        ("TSLM", TSLM, 47.2e6 * 28), ("Qwen2-2B", QWEN2B, 46.8e6 * 28), ("Qwen2-7B, 4 layers", QWEN7B, 233e6 * 4),
    ):  # fmt: skip
        for rows in (1, 8, 32):
            for variant in VARIANTS:
                make = lambda a=(shape, rows, 400, variant): _lm(*a)  # noqa: E731
                floor = round(parameters * 2 / 3.0e6, 1)
                found.append(Case("LM stack", f"{name}, {rows} rows x 400", variant, make, floor, calls=2))
    return found
