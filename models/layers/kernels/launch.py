"""What all kernels share: programmatic dependent launch, tile sizes, precision of products.

Under programmatic dependent launch (Hopper and later) a kernel's programs start while the kernel before still runs.
They may read weights at once, but must call `wait_for_previous` before they touch anything that an earlier kernel
writes or reads, and every program must call it, also one that has nothing to do: the kernel after relies on it.
"""

from __future__ import annotations

import os
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@cache
def dependent_launch() -> bool:
    return os.environ.get("TRITON_INTERPRET") != "1" and torch.cuda.get_device_capability() >= (9, 0)


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    if PDL:
        gdc_wait()


@triton.jit
def release_next(PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()


@cache
def num_processors() -> int:
    """Streaming multiprocessors of the current device; the interpreter pretends to be an H100."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return 132
    return torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count


def product_precision(x: Tensor) -> str:
    """Full float32 products for float32 operands; 16-bit operands are exact in any mode."""
    return "ieee" if x.dtype == torch.float32 else "tf32"


def split_width(width: int) -> tuple[int, int]:
    """A head dim as one power of two and a padded rest (0 if none): 80 -> (64, 16), 72 -> (64, 16), 12 -> (16, 0)."""
    if width <= 16:
        return 16, 0
    main = 1 << (width.bit_length() - 1)
    rest = width - main
    return main, 0 if rest == 0 else max(16, triton.next_power_of_2(rest))
