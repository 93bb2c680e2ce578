"""Measured rates of an H100. A roofline is the larger of arithmetic over the one and bytes over the other."""

from __future__ import annotations

FLOPS = 798e12
"""FLOP/s of a bf16 GEMM of 8192 x 8192 x 8192 on random data, measured."""
BYTES = 3.0e12
"""Bytes per second of a device-to-device copy, measured."""
