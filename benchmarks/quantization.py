"""What weights in e4m3 (`--quantization fp8`) take and what they leave of the answers, beside bfloat16.

python -m benchmarks.quantization decode [qwen2_vl_2b qwen2_vl_7b ...]   steps and prefills at full size, on a GPU
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import get_args

import torch

from benchmarks import decode
from benchmarks.full_size import free, measure_each
from benchmarks.record import Row, table
from models.checkpoint import Quantization


def both(name: str, directory: Path, device: torch.device) -> list[Row]:
    """Of one model, one after the other on the same GPU; each row with the time of the first by its own."""
    rows: list[Row] = []
    for quantization in get_args(Quantization):
        found = decode.measure(name, directory, device, quantization)
        rows += ({"quantization": quantization, **row} for row in found)
        free()
    plain = {(row["kind"], row["rows"]): row["graph_ms"] for row in rows if row["quantization"] == "none"}
    return [{**row, "of_bfloat16": row["graph_ms"] / plain[row["kind"], row["rows"]]} for row in rows]


def main() -> None:
    what, *names = sys.argv[1:]
    if what != "decode":
        raise SystemExit(__doc__)
    print(table(measure_each("quantization_decode", names or ["qwen2_vl_2b"], both)))


if __name__ == "__main__":
    main()
