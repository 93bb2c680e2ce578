"""The table of missed targets of steps, with what the best measured kernels allow them."""

from __future__ import annotations

from benchmarks.bounds import bound_of
from benchmarks.formatting import device_mark, markdown, number
from benchmarks.reading import Missing, Results
from benchmarks.step_tables import floor_ms
from benchmarks.targets import TARGETS, Target

UNPROFILED = "not profiled yet"


def bounds(results: Results) -> str:
    """Missed targets of steps beside what the best kernels allow."""
    rows, profiles = [], []
    for target in TARGETS:
        if target.step is None or target.limit is None:
            continue
        try:
            ours = target.ours(results)
        except Missing:
            continue
        if target.met(ours) and target.met_further(ours) is not False:
            continue
        floor = _step_floor_ms(results, target)
        bound = bound_of(results, target.step)
        further = "" if target.further is None else f", {target.further:g}"
        whole = UNPROFILED if bound.all_ms is None else f"{bound.all_ms / floor:.2f}"
        cells = ["" if ms is None else number(ms) for ms in (bound.gemms_ms, bound.attention_ms)]
        mark = device_mark(results[target.result])
        rows.append([f"{target.what}{mark}", f"{target.limit:g}{further}", number(floor), f"{ours:.2f}", *cells, whole])
        profiles.append(bound.profile)
    head = ["missed", "target, x roofline", "roofline, ms", "ours, x roofline"]
    head += ["best GEMMs, ms", "best attention, ms", "both, x roofline"]
    sources = [f"- {results[name].source}" for name in dict.fromkeys(profiles) if name]
    return "\n".join([markdown(head, rows), "", *sources])


def _step_floor_ms(results: Results, target: Target) -> float:
    assert target.step is not None
    result, step = results[target.result], target.step
    if step.model == "voxcpm2":
        return float(result.row(streams=int(step.size))["floor_ms"])
    if step.kind == "encoder":
        return floor_ms(result.row(input=step.size))
    return floor_ms(result.row(kind=step.kind, rows=int(step.size)))
