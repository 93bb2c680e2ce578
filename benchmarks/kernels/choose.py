"""The table of GEMM configurations that whole stacks are fastest with.

python -m benchmarks.kernels.choose [FOLDER] [--write]
    prints it from the results of `gemms` and `routed` in FOLDER; --write puts the table into
    models/layers/kernels/gemm_sm_90.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.kernels.gemms import STACKS, Part, Stack, shape_name, variants
from models.layers.kernels.gemm_tables import FILE, SM_90_E4M3, entries_of
from models.layers.kernels.gemm_types import Choice, Shape, Variant

Times = Mapping[tuple[str, str], dict[str, Any]]
"""Rows of a result by shape and variant."""
Routes = dict[Shape, tuple[Choice, ...]]
TABLES = ("rules", "split", "deferred")
"""No table; the best variants whose norms are kernels; the best where norms may also wait for the next GEMM."""
GAIN = 0.98
"""A choice must take less than this share of the time by the rules."""


def read(folder: Path, name: str, but: str | None = None) -> Times:
    """All results of `name`: those of name.json, and those of single stacks (name_*.json), measured later; without
    files whose names begin with `but`."""
    times: dict[tuple[str, str], dict[str, Any]] = {}
    files = (*folder.glob(f"{name}.json"), *sorted(folder.glob(f"{name}_*.json")))
    for file in (one for one in files if but is None or not one.name.startswith(but)):
        times |= {(row["shape"], row["variant"]): row for row in json.loads(file.read_text())["rows"]}
    return times


def best(times: Times, stack: Stack, part: Part, rows: int, deferred: bool) -> tuple[Variant | None, dict[str, Any]]:
    """The fastest variant measured and its row, None for the rules; a deferred norm only where it is allowed."""
    shape = shape_name(stack, part, rows)
    found: list[tuple[Variant | None, dict[str, Any]]] = [(None, times[shape, "rules"])]
    for variant in variants(part, rows):
        if variant.deferred <= deferred and (shape, str(variant)) in times:
            found.append((variant, times[shape, str(variant)]))
    return min(found, key=lambda pair: pair[1]["median_us"])


def chosen(times: Times, stack: Stack, rows: int, deferred: bool) -> dict[Shape, Choice]:
    """The table for one stack and number of rows. A norm is deferred only if the GEMM that reads it has a variant of
    its own."""
    found = {}
    for part in stack.parts:
        variant, _ = best(times, stack, part, rows, deferred)
        if variant is None and deferred and part.kind != "add_norm":
            variant = _best_variant(times, stack, part, rows)
        if variant is not None:
            shape = Shape(part.kind, part.inputs, part.outputs)
            found[shape] = Choice(*stack.span(rows), variant)
    return found


def _best_variant(times: Times, stack: Stack, part: Part, rows: int) -> Variant:
    shape = shape_name(stack, part, rows)
    measured = [variant for variant in variants(part, rows) if (shape, str(variant)) in times]
    return min(measured, key=lambda variant: times[shape, str(variant)]["median_us"])


def candidates(times: Times, stack: Stack) -> dict[str, Routes]:
    """The tables of TABLES for one stack."""
    return {
        name: _together(chosen(times, stack, rows, name == "deferred") for rows in stack.rows)
        if name != "rules"
        else {}
        for name in TABLES
    }


def _together(choices: Iterator[dict[Shape, Choice]]) -> Routes:
    merged: Routes = {}
    for choice in choices:
        for shape, one in choice.items():
            merged[shape] = (*merged.get(shape, ()), one)
    return merged


def final(times: Times, stacks: Times) -> Routes:
    """For every stack and number of rows, the table that its whole stack was fastest with; the encoder's by itself."""
    kept = []
    for stack in STACKS:
        for rows in stack.rows:
            shape = f"{stack.name}, {rows} rows"
            if (shape, "rules") in stacks:
                by_name = {name: stacks[shape, name]["median_us"] for name in TABLES if (shape, name) in stacks}
                name = min(by_name, key=lambda name: by_name[name])
                worth = by_name[name] < GAIN * by_name["rules"]
            else:
                (part,) = stack.parts
                name = "split"
                rules = times[shape_name(stack, part, rows), "rules"]["median_us"]
                worth = best(times, stack, part, rows, False)[1]["median_us"] < GAIN * rules
            if worth:
                kept.append(chosen(times, stack, rows, name == "deferred"))
    return _together(iter(kept))


def write(path: Path = FILE, **parts: list[Any]) -> None:
    """Replace parts of the file of tables, one line for each of their entries."""
    document = json.loads(path.read_text()) | parts
    blocks = (f"{json.dumps(name)}: [\n  " + ",\n  ".join(map(json.dumps, document[name])) + "\n]" for name in document)
    path.write_text("{\n" + ",\n".join(blocks) + "\n}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("benchmarks/results/kernels"))
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    times, stacks = read(arguments.folder, "gemms"), read(arguments.folder, "routed")
    found = final(times, stacks)
    print(*found.items(), sep="\n")
    if arguments.write:
        write(shapes=entries_of({**found, **SM_90_E4M3}))


if __name__ == "__main__":
    main()
