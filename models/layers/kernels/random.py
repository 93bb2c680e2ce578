"""Philox normals in one kernel; the arithmetic of models/layers/random.py."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.layers.kernels.launch import launch, release_next, wait_for_previous


@triton.jit
def philox(c0, c1, c2, c3, k0, k1):
    """Four random words from a counter of four and a key of two words, all uint32 tensors of one shape."""
    m0 = tl.full(c0.shape, 0xD2511F53, tl.uint32)
    m1 = tl.full(c0.shape, 0xCD9E8D57, tl.uint32)
    w0 = tl.full(c0.shape, 0x9E3779B9, tl.uint32)
    w1 = tl.full(c0.shape, 0xBB67AE85, tl.uint32)
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, m0)
        low0 = c0 * m0
        high1 = tl.umulhi(c2, m1)
        low1 = c2 * m1
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 += w0
        k1 += w1
    return c0, c1, c2, c3


@triton.jit
def _philox_normal_kernel(seeds, steps, out, count, BLOCKS: tl.constexpr, TWO_PI: tl.constexpr, PDL: tl.constexpr):
    release_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0)
    block = tl.arange(0, BLOCKS)
    seed = tl.load(seeds + row)
    c0 = block.to(tl.uint32)
    zero = tl.zeros_like(c0)
    c1 = zero + tl.load(steps + row).to(tl.uint32)
    k0 = zero + (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = zero + ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c0, c1, c2, c3 = philox(c0, c1, zero, zero, k0, k1)
    radius0 = tl.sqrt(-2.0 * tl.log(((c0 >> 8).to(tl.float32) + 0.5) * 5.9604644775390625e-08))
    radius1 = tl.sqrt(-2.0 * tl.log(((c2 >> 8).to(tl.float32) + 0.5) * 5.9604644775390625e-08))
    angle0 = (c1 >> 8).to(tl.float32) * (TWO_PI * 5.9604644775390625e-08)
    angle1 = (c3 >> 8).to(tl.float32) * (TWO_PI * 5.9604644775390625e-08)
    base = out + row.to(tl.int64) * count + 4 * block
    mask = 4 * block < count
    tl.store(base, radius0 * tl.cos(angle0), mask=mask)
    tl.store(base + 1, radius0 * tl.sin(angle0), mask=mask)
    tl.store(base + 2, radius1 * tl.cos(angle1), mask=mask)
    tl.store(base + 3, radius1 * tl.sin(angle1), mask=mask)


def philox_normal(seeds: Tensor, steps: Tensor, count: int) -> Tensor:
    if count % 4:
        raise ValueError(f"count {count} is not a multiple of 4")
    out = torch.empty((seeds.shape[0], count), dtype=torch.float32, device=seeds.device)
    blocks = triton.next_power_of_2(count // 4)
    launch(_philox_normal_kernel, (seeds.shape[0],), seeds, steps, out, count, BLOCKS=blocks, TWO_PI=2.0 * math.pi)
    return out
