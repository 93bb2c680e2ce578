"""Packed variable-length attention on the encoders' shapes, paged decode, and the local attention of VoxCPM2."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from benchmarks.kernels.timing import Case, Run
from models.layers.fused import rotary_dense_attention_reference
from models.layers.kernels.paged_decode import paged_decode_attention_cuda
from models.layers.kernels.rotary import rotary_dense_attention_cuda
from models.layers.kernels.varlen import varlen_attention_cuda

FLOPS = 7.0e8
BANDWIDTH = 3.0e6
VARLEN_TILES = {
    "128x64w8s3": (128, 64, 8, 3),
    "128x128w8s2": (128, 128, 8, 2),
    "64x64w4s3": (64, 64, 4, 3),
    "64x64w4s4": (64, 64, 4, 4),
    "64x64w4s2": (64, 64, 4, 2),
    "64x128w4s2": (64, 128, 4, 2),
}

PAGED = [
    ("voxcpm2", 16, 2, 128, 128),
    ("qwen2b", 12, 2, 128, 128),
    ("qwen7b", 28, 4, 128, 128),
    ("mla", 16, 1, 576, 512),
]


def _varlen(segments: int, length: int, heads: int, kv_heads: int, width: int, causal: bool, variant: str) -> Run:
    total = heads + 2 * kv_heads
    packed = [torch.randn(segments * length, total, width, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    parts = [p.split((heads, kv_heads, kv_heads), dim=1) for p in packed]
    cu = torch.arange(0, (segments + 1) * length, length, device="cuda", dtype=torch.int32)
    scale = width**-0.5
    if variant == "flash":
        return lambda i: torch.ops.aten._flash_attention_forward(
            *parts[i % 4], cu, cu, length, length, 0.0, causal, False, scale=scale
        )
    if variant == "dense cudnn":

        def dense(i: int) -> object:
            q, k, v = (t.unflatten(0, (segments, length)).transpose(1, 2) for t in parts[i % 4])
            with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
                return F.scaled_dot_product_attention(q, k, v, scale=scale)

        return dense
    tile = VARLEN_TILES[variant]
    return lambda i: varlen_attention_cuda(*parts[i % 4], cu, cu, scale, causal, tile=tile)


def _paged(rows: int, heads: int, kv_heads: int, width: int, values: int, length: int, splits: int | None) -> Run:
    page, pages = 16, 2048 // 16
    sets = 4 if rows * length * kv_heads * width < 40e6 else 2
    q = torch.randn(rows, heads, width, device="cuda", dtype=torch.bfloat16)
    shape = ((rows * pages + 1) * page, kv_heads, width)
    caches = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2 * sets)]
    tables = (torch.randperm(rows * pages, device="cuda").int() + 1).view(rows, pages)
    lengths = torch.full((rows,), length, device="cuda", dtype=torch.int32)

    def run(i: int) -> object:
        k = caches[2 * (i % sets)]
        v = caches[2 * (i % sets) + 1] if values == width else k[..., :values]
        return paged_decode_attention_cuda(q, k, v, tables, lengths, page, 0.1, splits=splits)

    return run


def _local(sequences: int, length: int, heads_here: int | None, plain: bool) -> Run:
    qkv = [torch.randn(sequences, length, 20, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    parts = [p.split((16, 2, 2), dim=2) for p in qkv]
    cos, sin = torch.randn(length, 64, device="cuda"), torch.randn(length, 64, device="cuda")
    if plain:
        return lambda i: rotary_dense_attention_reference(*parts[i % 4], cos, sin, 0)
    return lambda i: rotary_dense_attention_cuda(*parts[i % 4], cos, sin, 0, heads_here=heads_here)


def cases() -> list[Case]:
    found = []
    for heads, kv_heads, width, causal, shapes in [
        (16, 16, 80, False, [(1, 256), (1, 1024), (4, 1024), (1, 4096), (16, 256)]),
        (16, 16, 72, False, [(1, 1024), (10, 1024), (1, 4096)]),
        (12, 2, 128, True, [(1, 384), (8, 384), (1, 4096)]),
    ]:
        for segments, length in shapes:
            floor = 4 * segments * length**2 * heads * width / FLOPS / (2 if causal else 1)
            kinds = ["flash", *VARLEN_TILES] + ([] if causal else ["dense cudnn"])
            for variant in kinds:
                make = lambda a=(segments, length, heads, kv_heads, width, causal, variant): _varlen(*a)  # noqa: E731
                found.append(Case("varlen", f"{segments} x {length}, {heads} x {width}", variant, make, floor))
    for name, heads, kv_heads, width, values in PAGED:
        for rows, length in [(1, 400), (1, 2000), (8, 400), (8, 2000), (32, 400), (64, 1000)]:
            floor = rows * length * kv_heads * (width if values != width else 2 * width) * 2 / BANDWIDTH
            for splits in (None, 4, 8, 16):
                make = lambda a=(rows, heads, kv_heads, width, values, length, splits): _paged(*a)  # noqa: E731
                variant = "chosen" if splits is None else f"{splits} splits"
                found.append(Case("paged decode", f"{name}, {rows} x {length}", variant, make, floor))
    for length in (5, 11):
        for sequences in (2, 16, 64, 128):
            for variant, heads_here, plain in [
                ("torch", None, True), ("chosen", None, False), ("1 head", 1, False), ("2 heads", 2, False),
                ("4 heads", 4, False), ("8 heads", 8, False),
            ]:  # fmt: skip
                make = lambda a=(sequences, length, heads_here, plain): _local(*a)  # noqa: E731
                found.append(Case("local", f"{sequences} x {length}", variant, make))
    return found
