"""The best configurations of GEMMs with weights in e4m3.

python -m benchmarks.kernels.choose_e4m3 [FOLDER] [--write]
    prints them from the results of `e4m3` and `e4m3_steps` in FOLDER; --write puts them into
    models/layers/kernels/gemm_sm_90.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from benchmarks.kernels import choose
from benchmarks.kernels.e4m3 import BLOCKS, MODELS, blocks_name, variants
from benchmarks.kernels.e4m3_steps import shape_of
from benchmarks.kernels.gemms import Part
from models.layers.kernels.gemm_tables import SM_90, entries_of
from models.layers.kernels.gemm_types import Blocks, Choice, Shape

SPANS: Mapping[int, tuple[int, int]] = {8: (2, 16), 32: (17, 32), 128: (65, 192), 384: (193, 512)}
"""Measured rows -> for which the choice holds. Between 33 and 64 and beyond 512 the rules hold."""


def table(times: choose.Times) -> dict[Shape, tuple[Choice, ...]]:
    """The fastest tile of each shape and number of rows; none where cuBLAS is faster in e4m3."""
    found: dict[Shape, tuple[Choice, ...]] = {}
    for model, part in _parts():
        choices = []
        for rows, span in SPANS.items():
            shape = f"{model} {part.name}, {rows} rows"
            measured = [(variant, times.get((shape, str(variant)))) for variant in variants(part, rows)]
            by_time = {_time(row): variant for variant, row in measured if row is not None}
            if by_time and min(by_time) < _time(times.get((shape, "scaled_mm"))):
                choices.append(Choice(*span, by_time[min(by_time)]))
        found[Shape(part.kind, part.inputs, part.outputs, True)] = tuple(choices)
    return found


def blocks(times: choose.Times, in_steps: Mapping[str, str]) -> dict[Shape, Blocks]:
    """The fastest blocks of each shape's GEMV: in whole steps, where that was measured, or alone."""
    found = {}
    for model, part in _parts():
        name = in_steps.get(f"{model} {part.name}")
        shape = f"{model} {part.name}, 1 rows"
        alone = min(BLOCKS, key=lambda one: _time(times.get((shape, blocks_name(one)))))
        found[shape_of(part)] = next((one for one in BLOCKS if blocks_name(one) == name), alone)
    return found


def copies(times: choose.Times) -> dict[tuple[int, int], int]:
    """(inputs, outputs) of layers that keep a copy in 16 bits, and the rows from which it is used.

    Where all layers of a block together are slower than in bfloat16, those that lose most are taken from the copy,
    until they are not. What was measured with most rows holds beyond them.
    """
    found: dict[tuple[int, int], int] = {}
    for model, parts in MODELS.items():
        for rows, (least, _) in SPANS.items():
            losses = {}
            for part in parts:
                shape = f"{model} {part.name}, {rows} rows"
                own = [_time(times.get((shape, str(variant)))) for variant in variants(part, rows)]
                e4m3, plain = min([*own, _time(times.get((shape, "scaled_mm")))]), times.get((shape, "bfloat16"))
                if part.name != "head" and plain is not None:
                    losses[part.inputs, part.outputs] = e4m3 - _time(plain)
            for sizes, loss in sorted(losses.items(), key=lambda one: -one[1]):
                if sum(losses.values()) <= 0 or loss <= 0:
                    break
                losses[sizes] = 0.0
                found.setdefault(sizes, least)
    return found


def read_times(folder: Path) -> choose.Times:
    """All results of `e4m3`."""
    return choose.read(folder, "e4m3", but="e4m3_steps_")


def read_steps(folder: Path) -> dict[str, str]:
    """The names of the best blocks by shape, of all results of `e4m3_steps`."""
    rows = (row for file in sorted(folder.glob("e4m3_steps_*.json")) for row in json.loads(file.read_text())["rows"])
    return {row["shape"]: row["blocks"] for row in rows if row["best"]}


def _parts() -> Iterator[tuple[str, Part]]:
    yield from ((model, part) for model, parts in MODELS.items() for part in parts)


def _time(row: dict[str, Any] | None) -> float:
    return float("inf") if row is None or row["median_us"] is None else float(row["median_us"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("benchmarks/results/kernels"))
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    times = read_times(arguments.folder)
    tiles, vectors, copied = table(times), blocks(times, read_steps(arguments.folder)), copies(times)
    print(*tiles.items(), *vectors.items(), *copied.items(), sep="\n")
    if arguments.write:
        choose.write(
            shapes=entries_of({**SM_90, **tiles}),
            e4m3_blocks=[to_builtins(shape) | {"blocks": one} for shape, one in vectors.items()],
            e4m3_copies=[(*sizes, least) for sizes, least in copied.items()],
        )


if __name__ == "__main__":
    main()
