"""Numbers of bytes as operators write them."""

from __future__ import annotations

import re

MIB = 1 << 20
GIB = 1 << 30
MOST = (1 << 63) - 1
UNITS = {"": 1, "K": 1 << 10, "M": MIB, "G": GIB}


def parse_bytes(value: str) -> int:
    """ "512M" -> 536870912. ValueError for any other text, and for more than MOST."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", value.strip(), re.I)
    if match is None:
        raise ValueError("must be a number of bytes, such as 1048576, 512M or 4G")
    size = float(match[1]) * UNITS[match[2].upper()]
    if size > MOST:
        raise ValueError(f"must be at most {MOST} bytes")
    return int(size)
