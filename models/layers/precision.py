"""How float32 operands enter a product on tensor cores."""

from __future__ import annotations

from typing import Literal, get_args

Precision = Literal["ieee", "tf32", "float16"]
"""Of a product's operands; its sums are float32. tf32 and float16 both keep 10 bits of mantissa; float16 takes half the
bytes and saturates at +-65504."""

PRECISIONS: tuple[Precision, ...] = get_args(Precision)
