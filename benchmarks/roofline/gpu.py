"""Rates of the GPU. A roofline is the larger of arithmetic over the one and bytes over the other."""

from __future__ import annotations

import torch

FLOPS = 798e12
"""FLOP/s of a bf16 GEMM of 8192 x 8192 x 8192 on random data, measured on an H100; an H200 has the same cores."""
BYTES = 3.0e12
"""Bytes per second of a device-to-device copy, measured on an H100."""
H200_BYTES = 4.8e12
"""Bytes per second of an H200's data sheet."""


def bytes_per_second() -> float:
    """Of the first GPU; without one, and of others than an H200, an H100's."""
    h200 = torch.cuda.is_available() and "H200" in torch.cuda.get_device_name(0)
    return H200_BYTES if h200 else BYTES
