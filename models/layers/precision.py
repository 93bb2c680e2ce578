"""The precision of GEMMs on tensor cores, and of the plain PyTorch that kernels are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from torch import Tensor

Precision = Literal["ieee", "tf32", "float16"]
"""Precision in which a GEMM multiplies float32 operands; sums are float32. tf32 and float16 both keep 10 bits of
mantissa; float16 takes half the bytes and saturates at +-65504."""


def upcast(x: Tensor) -> Tensor:
    """x as float32, or as float64 if it is float64: the reference of a kernel must not round as the kernel does."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@contextmanager
def without_tf32() -> Iterator[None]:
    """Multiply float32 in full precision inside, whatever the environment or torch's defaults allow."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    allowed = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = allowed
