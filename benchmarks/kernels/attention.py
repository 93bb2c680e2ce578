"""Packed variable-length attention on the encoders' shapes, paged decode, and the local attention of VoxCPM2."""

from __future__ import annotations

from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.timing import Case
from models.layers.attention import attend_pages, attend_segments
from models.layers.fused import rotary_dense_attention
from models.layers.kernels.current_kv import CurrentKV
from models.layers.kernels.paged_decode import number_of_splits
from models.layers.one_segment import attend_lengthened, lengthen
from models.layers.packed import rotate_packed
from models.layers.rotary import rotate_and_cache
from service.tuning.timer import Run

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

PAGE = 16
TABLE = 32_768 // PAGE
"""Columns of a block table: a captured step has room for the longest sequence."""
WAYS = ("separate", "rotated inside")
DECODES = [
    ("qwen2b", 12, 2, (1, 8, 32, 64, 128), (512, 2000)),
    ("qwen7b", 28, 4, (1, 8, 32, 64, 128), (512, 2000)),
    ("voxcpm2", 16, 2, (8, 32), (400,)),
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
    return lambda i: attend_segments.kernel(*parts[i % 4], cu, cu, scale, causal, tile=tile)


def _one_segment(rows: int, padding: int, width: int, variant: str) -> Run:
    """From the projection to the attended values of one picture in a captured bucket: its rotation belongs to it."""
    every = rows + padding
    packed = [torch.randn(every, 48, width, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    angles = torch.randn(every, width // 2, device="cuda")
    cos, sin = angles.cos(), angles.sin()
    ends = torch.tensor([0, rows], device="cuda", dtype=torch.int32)
    if variant == "lengthening alone":
        return lambda i: lengthen.kernel(packed[i % 4], cos, sin, ends, False)
    if variant.startswith("dense cudnn, lengthened"):
        with_values = variant.endswith("values too")
        return lambda i: attend_lengthened(packed[i % 4], cos, sin, ends, with_values)

    def run(i: int) -> object:
        rotate_packed.kernel(packed[i % 4], 32, cos, sin)
        q, k, v = packed[i % 4].chunk(3, dim=1)
        if variant == "varlen":
            return attend_segments.kernel(q, k, v, ends, ends, width**-0.5, False)
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, scale=width**-0.5)

    return run


def _one_segment_cases() -> list[Case]:
    """dense cudnn without more attends to padding, too: what an exact bucket would take."""
    found = []
    variants = (
        "varlen", "dense cudnn", "dense cudnn, lengthened", "dense cudnn, lengthened, values too", "lengthening alone"
    )  # fmt: skip
    exact = ((784, 0), (1024, 0), (1200, 0), (1564, 0), (8160, 0))
    for width, (rows, padding) in product((64, 72, 80), ((2048, 0), (4096, 0), (5476, 28), (8160, 32), *exact)):
        floor = 4 * rows**2 * 16 * width / FLOPS
        for variant in variants:
            make = lambda a=(rows, padding, width, variant): _one_segment(*a)  # noqa: E731
            shape = f"{rows} of {rows + padding}, 16 x {width}"
            found.append(Case("one segment", shape, variant, make, None if variant == "lengthening alone" else floor))
    return found


def _pages(rows: int, length: int) -> tuple[Tensor, int]:
    """Block tables int32 [rows, TABLE] of shuffled pages, and the rows of a cache for them."""
    pages = -(-length // PAGE)
    tables = torch.zeros(rows, TABLE, device="cuda", dtype=torch.int32)
    tables[:, :pages] = (torch.randperm(rows * pages, device="cuda").int() + 1).view(rows, pages)
    return tables, (rows * pages + 1) * PAGE


def _latent_decode(rows: int, length: int, splits: int | None) -> Run:
    tables, slot_mapping = _pages(rows, length)
    q = torch.randn(rows, 16, 576, device="cuda", dtype=torch.bfloat16)
    caches = [torch.randn(slot_mapping, 1, 576, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    lengths = torch.full((rows,), length, device="cuda", dtype=torch.int32)

    def run(i: int) -> object:
        k = caches[i % 4]
        return attend_pages.kernel(q, k, k[..., :512], tables, lengths, PAGE, 0.1, splits=splits)

    return run


def _decode(rows: int, heads: int, kv_heads: int, length: int, way: str, splits: int) -> Run:
    """From the projection to the attended values, the new token being the last of `length`."""
    tables, slot_mapping = _pages(rows, length)
    shape = (slot_mapping, kv_heads, 128)
    sets = 4 if shape[0] * kv_heads * 128 < 40e6 else 2
    caches = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(2 * sets)]
    packed = [torch.randn(rows, heads + 2 * kv_heads, 128, device="cuda", dtype=torch.bfloat16) for _ in range(sets)]
    parts = [p.split((heads, kv_heads, kv_heads), dim=1) for p in packed]
    rotary = torch.randn(rows, 64, device="cuda"), torch.randn(rows, 64, device="cuda")
    lengths = torch.full((rows,), length, device="cuda", dtype=torch.int32)
    slots = tables[:, (length - 1) // PAGE].long() * PAGE + (length - 1) % PAGE

    def run(i: int) -> object:
        (q, k, v), keys, values = parts[i % sets], caches[2 * (i % sets)], caches[2 * (i % sets) + 1]
        current_kv: CurrentKV | None = CurrentKV(k, v, rotary, slots)
        if way == "separate":
            q, current_kv = rotate_and_cache.kernel(q, k, v, rotary, keys, values, slots)[0], None
        return attend_pages.kernel(q, keys, values, tables, lengths, PAGE, 0.1, current_kv=current_kv, splits=splits)

    return run


def _decode_cases() -> list[Case]:
    """As many splits as chosen, half of them, and fixed numbers; for latent attention too."""
    found = []
    for name, heads, kv_heads, batches, contexts in DECODES:
        for rows, length in product(batches, contexts):
            chosen = number_of_splits(rows * kv_heads, TABLE * PAGE)
            floor = rows * length * kv_heads * 128 * 4 / BANDWIDTH
            for way, splits in product(WAYS, dict.fromkeys((chosen, max(1, chosen // 2), 4, 8, *[16] * (rows == 1)))):
                make = lambda a=(rows, heads, kv_heads, length, way, splits): _decode(*a)  # noqa: E731
                variant = f"{way}, {splits} splits" + " (chosen)" * (splits == chosen)
                found.append(Case("paged decode", f"{name}, {rows} x {length}", variant, make, round(floor, 2)))
    for rows, length in [(1, 400), (1, 2000), (8, 400), (8, 2000), (32, 400), (64, 1000)]:
        for splits in (None, 4, 8, 16):
            make = lambda a=(rows, length, splits): _latent_decode(*a)  # noqa: E731
            variant = "chosen" if splits is None else f"{splits} splits"
            floor = rows * length * 576 * 2 / BANDWIDTH
            found.append(Case("paged decode", f"mla, {rows} x {length}", variant, make, round(floor, 2)))
    return found


def _local(sequences: int, length: int, heads_here: int | None, plain: bool) -> Run:
    qkv = [torch.randn(sequences, length, 20, 128, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    parts = [p.split((16, 2, 2), dim=2) for p in qkv]
    cos, sin = torch.randn(length, 64, device="cuda"), torch.randn(length, 64, device="cuda")

    def run(i: int) -> object:
        q, k, v = parts[i % 4]
        if plain:
            return rotary_dense_attention.reference(q, k, v, cos, sin, 0)
        return rotary_dense_attention.kernel(q, k, v, cos, sin, 0, heads_here=heads_here)

    return run


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
    found += _one_segment_cases()
    found += _decode_cases()
    for length in (5, 11):
        for sequences in (2, 16, 64, 128):
            for variant, heads_here, plain in [
                ("torch", None, True), ("chosen", None, False), ("1 head", 1, False), ("2 heads", 2, False),
                ("4 heads", 4, False), ("8 heads", 8, False),
            ]:  # fmt: skip
                make = lambda a=(sequences, length, heads_here, plain): _local(*a)  # noqa: E731
                found.append(Case("local", f"{sequences} x {length}", variant, make))
    return found
