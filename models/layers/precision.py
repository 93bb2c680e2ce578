"""The precision of GEMMs on tensor cores, and of the plain PyTorch that kernels are compared with."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Precision = Literal["ieee", "tf32", "float16"]
"""Precision in which a GEMM multiplies float32 operands; sums are float32. tf32 and float16 both keep 10 bits of
mantissa; float16 takes half the bytes and saturates at +-65504."""


def upcast(x: Tensor) -> Tensor:
    """x as float32, or as float64 if it is float64: the reference of a kernel must not round as the kernel does."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
