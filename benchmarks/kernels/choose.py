"""The tables of GEMM configurations that whole stacks are fastest with, and of those with weights in e4m3.

python -m benchmarks.kernels.choose [FOLDER] [--write]
    prints them from the results of `gemms`, `routed` and `e4m3` in FOLDER; --write puts them into
    models/layers/kernels/gemm_sm_90.json
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import to_builtins

from benchmarks.kernels import e4m3
from benchmarks.kernels.gemms import STACKS, Part, Stack, shape_name, variants
from benchmarks.measure.command_line import command_line
from models.layers.kernels.gemm_tables import FILE, SM_90, entries_of
from models.layers.kernels.gemm_types import Blocks, Choice, Kind, Shape, Variant

Times = Mapping[tuple[str, str], dict[str, Any]]
"""Rows of a result by shape and variant."""
Routes = dict[Shape, tuple[Choice, ...]]
TABLES = ("rules", "split", "deferred")
"""No table; the best variants whose norms are kernels; the best where norms may also wait for the next GEMM."""
GAIN = 0.98
"""A choice must take less than this share of the time by the rules."""
SPANS: Mapping[int, tuple[int, int]] = {8: (2, 16), 32: (17, 32), 128: (65, 192), 384: (193, 512)}
"""Rows measured in e4m3 -> for which the choice holds. Between 33 and 64 and beyond 512 the rules hold."""


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


def e4m3_tiles(times: Times) -> dict[Shape, tuple[Choice, ...]]:
    """The fastest tile of each shape and number of rows; none where cuBLAS is faster in e4m3."""
    found: dict[Shape, tuple[Choice, ...]] = {}
    for model, part in _e4m3_parts():
        choices = []
        for rows, span in SPANS.items():
            shape = f"{model} {part.name}, {rows} rows"
            measured = [(variant, times.get((shape, str(variant)))) for variant in e4m3.variants(part, rows)]
            by_time = {_time(row): variant for variant, row in measured if row is not None}
            if by_time and min(by_time) < _time(times.get((shape, "scaled_mm"))):
                choices.append(Choice(*span, by_time[min(by_time)]))
        found[Shape(part.kind, part.inputs, part.outputs, True)] = tuple(choices)
    return found


def e4m3_blocks(times: Times, in_steps: Mapping[str, str]) -> dict[Shape, Blocks]:
    """The fastest blocks of each shape's GEMV: in whole steps, where that was measured, or alone."""
    found = {}
    for model, part in _e4m3_parts():
        shape, by_name = f"{model} {part.name}, 1 rows", {e4m3.blocks_name(one): one for one in e4m3.BLOCKS}
        alone = min(by_name, key=lambda name: _time(times.get((shape, name))))
        kind: Kind = "silu_mul" if part.kind == "silu_mul" else "plain"  # all of them add the residual
        found[Shape(kind, part.inputs, part.outputs, True)] = by_name[in_steps.get(f"{model} {part.name}", alone)]
    return found


def e4m3_copies(times: Times) -> dict[tuple[int, int], int]:
    """(inputs, outputs) of layers that keep a copy in 16 bits, and the rows from which it is used.

    Where all layers of a block together are slower than in bfloat16, those that lose most are taken from the copy,
    until they are not. What was measured with most rows holds beyond them.
    """
    found: dict[tuple[int, int], int] = {}
    for model, parts in e4m3.MODELS.items():
        for rows, (least, _) in SPANS.items():
            losses = {}
            for part in parts:
                shape = f"{model} {part.name}, {rows} rows"
                own = [_time(times.get((shape, str(variant)))) for variant in e4m3.variants(part, rows)]
                small, plain = min([*own, _time(times.get((shape, "scaled_mm")))]), times.get((shape, "bfloat16"))
                if part.name != "head" and plain is not None:
                    losses[part.inputs, part.outputs] = small - _time(plain)
            for sizes, loss in sorted(losses.items(), key=lambda one: -one[1]):
                if sum(losses.values()) <= 0 or loss <= 0:
                    break
                losses[sizes] = 0.0
                found.setdefault(sizes, least)
    return found


def read_e4m3(folder: Path) -> Times:
    """All results of `e4m3`."""
    return read(folder, "e4m3", but="e4m3_steps_")


def read_e4m3_steps(folder: Path) -> dict[str, str]:
    """The names of the best blocks by shape, measured in whole decode steps of one row at the commit of the result."""
    rows = (row for file in sorted(folder.glob("e4m3_steps_*.json")) for row in json.loads(file.read_text())["rows"])
    return {row["shape"]: row["blocks"] for row in rows if row["best"]}


def _e4m3_parts() -> Iterator[tuple[str, Part]]:
    yield from ((model, part) for model, parts in e4m3.MODELS.items() for part in parts)


def _time(row: dict[str, Any] | None) -> float:
    return float("inf") if row is None or row["median_us"] is None else float(row["median_us"])


def write(path: Path = FILE, **parts: list[Any]) -> None:
    """Replace parts of the file of tables, one line for each of their entries."""
    document = json.loads(path.read_text()) | parts
    blocks = (f"{json.dumps(name)}: [\n  " + ",\n  ".join(map(json.dumps, document[name])) + "\n]" for name in document)
    path.write_text("{\n" + ",\n".join(blocks) + "\n}\n")


def main() -> None:
    parser = command_line("benchmarks.kernels.choose", __doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=Path("benchmarks/results/kernels"))
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    found = final(read(arguments.folder, "gemms"), read(arguments.folder, "routed"))
    times = read_e4m3(arguments.folder)
    tiles, copies = e4m3_tiles(times), e4m3_copies(times)
    blocks = e4m3_blocks(times, read_e4m3_steps(arguments.folder))
    print(*found.items(), *tiles.items(), *blocks.items(), *copies.items(), sep="\n")
    if arguments.write:
        write(
            shapes=entries_of({**SM_90, **found, **tiles}),
            e4m3_blocks=[to_builtins(shape) | {"blocks": one} for shape, one in blocks.items()],
            e4m3_copies=[(*sizes, least) for sizes, least in copies.items()],
        )


if __name__ == "__main__":
    main()
