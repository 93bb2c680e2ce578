"""GEMM configurations that come with the package, and their form in a file.

gemm_sm_90.json was measured on an H100, for Qwen3.5 on an H200 GEMM by GEMM, and is for every GPU of compute
capability 9.0. `python -m benchmarks.kernels.choose` writes it from the results of `python -m benchmarks.kernels`, but
for "codes" and "codes_blocks": what codes with scales of 128 inputs or more were measured to take.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from models.layers.kernels.gemm_types import Blocks, Choice, Shape, Table

FILE = Path(__file__).with_name("gemm_sm_90.json")


def entries_of(table: Table) -> list[dict[str, Any]]:
    """The table as plain values, one dict for each shape."""
    return [msgspec.to_builtins(shape) | {"choices": msgspec.to_builtins(table[shape])} for shape in table]


def table_of(entries: Iterable[Mapping[str, Any]]) -> Table:
    """Inverse of `entries_of`. Raises KeyError and msgspec.ValidationError, a ValueError."""
    return {msgspec.convert(entry, Shape): msgspec.convert(entry["choices"], tuple[Choice, ...]) for entry in entries}


_measured = json.loads(FILE.read_text())
_all = table_of(_measured["shapes"])
SM_90: Table = {shape: choices for shape, choices in _all.items() if not shape.e4m3}
SM_90_E4M3: Table = {shape: choices for shape, choices in _all.items() if shape.e4m3}
SM_90_CODES: Table = table_of(_measured["codes"])
SM_90_E4M3_BLOCKS, SM_90_CODES_BLOCKS = (
    {msgspec.convert(entry, Shape): Blocks(*entry["blocks"]) for entry in _measured[name]}
    for name in ("e4m3_blocks", "codes_blocks")
)
SM_90_E4M3_COPIES: Mapping[tuple[int, int], int] = {
    (inputs, outputs): least for inputs, outputs, least in _measured["e4m3_copies"]
}
"""(inputs, outputs) of layers that keep a copy in 16 bits, and the rows from which it is read."""
SM_90_PERSISTENT: Mapping[tuple[int, int], tuple[tuple[int, int], ...]] = {
    (inputs, outputs): tuple((least, most) for least, most in spans)
    for inputs, outputs, spans in _measured["persistent"]
}
"""For inputs and outputs, the fewest and the most rows that models.layers.kernels.persistent_gemm is faster for
(benchmarks/results/kernels/persistent.json)."""
