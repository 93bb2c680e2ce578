"""The way from measured GEMMs to the table of GEMM configurations, on results that are made up."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

from benchmarks.kernels import choose
from benchmarks.kernels.gemms import STACKS, Part, shape_name, variants
from models.layers.kernels.gemm_tables import FILE, entries_of, table_of
from models.layers.kernels.gemm_types import Choice, Shape, Tile, Variant
from service.engine.core.worker import WARM_TOKENS

LOCDIT = STACKS[0]


def row(shape: str, variant: str, us: float) -> dict[str, object]:
    return {"shape": shape, "variant": variant, "median_us": us}


def results(folder: Path, fastest: dict[tuple[str, int], Variant], stacks: dict[str, dict[str, float]]) -> None:
    """gemms.json and routed.json: 10 us by the rules, 9 for the variants named, 11 for all others."""
    rows = []
    for stack in STACKS:
        for part in stack.parts:
            for count in stack.rows:
                shape = shape_name(stack, part, count)
                rows.append(row(shape, "rules", 10.0))
                for variant in variants(part, count):
                    rows.append(row(shape, str(variant), 9.0 if fastest.get((part.name, count)) == variant else 11.0))
    (folder / "gemms.json").write_text(json.dumps({"rows": rows}))
    rows = [row(shape, name, us) for shape, times in stacks.items() for name, us in times.items()]
    (folder / "routed.json").write_text(json.dumps({"rows": rows}))


def final(folder: Path) -> choose.Routes:
    return choose.final(choose.read(folder, "gemms"), choose.read(folder, "routed"))


def every_stack(times: dict[str, float]) -> dict[str, dict[str, float]]:
    return {f"{stack.name}, {rows} rows": times for stack in STACKS[:-1] for rows in stack.rows}


def part(name: str) -> Part:
    return next(one for one in LOCDIT.parts if one.name == name)


def test_the_table_of_the_fastest_stack_is_kept_row_by_row(tmp_path: Path) -> None:
    gate_up = Variant(Tile(128, 128, 64, 8, 3))
    down = Variant(Tile(64, 64, 128, 4, 4), deferred=True)
    fastest = {("gate_up", 176): gate_up, ("gate_up", 352): gate_up, ("down", 352): down}
    stacks = every_stack({"rules": 100.0, "split": 101.0, "deferred": 102.0})
    stacks["locdit, 176 rows"] = {"rules": 100.0, "split": 90.0, "deferred": 95.0}
    stacks["locdit, 352 rows"] = {"rules": 100.0, "split": 90.0, "deferred": 80.0}
    results(tmp_path, fastest, stacks)
    found = final(tmp_path)
    assert found[Shape("silu_mul", 1024, 4096)] == (Choice(129, 176, gate_up), Choice(177, 352, gate_up))
    assert found[Shape("add_norm", 4096, 1024)] == (Choice(177, 352, down),)
    # A consumer of a deferred norm has a variant even where the rules were faster.
    assert [choice.least for choice in found[Shape("plain", 1024, 2560)]] == [177]


def test_the_table_is_written_as_it_reads(tmp_path: Path) -> None:
    found = {
        Shape("silu_mul", 1024, 4096): (Choice(129, 176, Variant(Tile(64, 64, 64, 4, 4, tma=True))),),
        Shape("add_norm", 4096, 1024): (
            Choice(129, 176, Variant(Tile(16, 64, 64, 4, 4, swap=True), split=4)),
            Choice(177, 352, Variant(Tile(64, 64, 64), deferred=True)),
        ),
    }
    path = tmp_path / "tables.json"
    path.write_text(FILE.read_text())
    for table in (found, {}, found):
        choose.write(path, shapes=entries_of(table))
        written = json.loads(path.read_text())
        assert repr(table_of(written.pop("shapes"))) == repr(table)
        assert written == {key: rows for key, rows in json.loads(FILE.read_text()).items() if key != "shapes"}


def test_choices_of_prefills_change_at_powers_of_two() -> None:
    """WARM_TOKENS meets them all."""
    for stack in STACKS:
        spans = [stack.span(rows) for rows in stack.rows]
        assert spans[0][0] == stack.least
        assert all(least == before + 1 for (_, before), (least, _) in pairwise(spans))
        assert all(least <= rows <= most for rows, (least, most) in zip(stack.rows, spans, strict=True))
        if stack.name.endswith("prefill"):
            assert all(most.bit_count() == 1 and most <= WARM_TOKENS for _, most in spans)
