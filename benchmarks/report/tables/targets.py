"""Tables that judge our figures: comparison with the best peer, targets, and what the best measured kernels allow of
those that steps missed."""

from __future__ import annotations

from benchmarks.report.bounds import bound_of
from benchmarks.report.comparisons import COMPARISONS
from benchmarks.report.figures import floor_ms
from benchmarks.report.formatting import PEER_NAMES, UNMEASURED, device_mark, markdown, number
from benchmarks.report.results import Missing, Results
from benchmarks.report.targets import TARGETS, Target

UNPROFILED = "not profiled yet"


def _met(target: Target, value: float) -> str:
    met = target.met(value)
    if met is None:
        return ""
    if not met:
        return "**no**"
    return "yes, the further one **no**" if target.met_further(value) is False else "yes"


def _precise(value: float, limit: float | None) -> str:
    """With a digit more where the limit is so near that rounding would hide on which side the value lies."""
    near = limit is not None and value != limit and number(value) == number(limit)
    return f"{value:.4g}" if near else number(value)


def _target_row(target: Target, results: Results) -> list[str]:
    unit = f" {target.unit}" if target.unit else ""

    def limit(value: float | None) -> str:
        return "" if value is None else f"{'>=' if target.at_least else '<='} {value:,g}{unit}"

    try:
        value = target.ours(results)
        mark = device_mark(results[target.result]) if target.result else ""
        ours, met = _precise(value, target.limit) + unit + mark, _met(target, value)
    except Missing:
        ours, met = UNMEASURED, ""
    return [target.what, _peer(target, results, unit), limit(target.limit), limit(target.further), ours, met]


def _peer(target: Target, results: Results, unit: str) -> str:
    """ "" where it is a multiple of a roofline that is not measured yet."""
    try:
        peer = target.peer(results) if callable(target.peer) else target.peer
    except Missing:
        return ""
    return peer if isinstance(peer, str) else number(peer) + unit


def targets(results: Results) -> str:
    head = ["", "today's best peer", "target", "further target", "ours", "met"]
    return markdown(head, [_target_row(target, results) for target in TARGETS])


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


def comparison(results: Results) -> str:
    """The few figures that a reader begins with."""
    rows = []
    for entry in COMPARISONS:
        unit = f" {entry.unit}" if entry.unit else ""
        try:
            ours, gpu = entry.ours(results), results[entry.result].facts["device"]["name"]
        except Missing:
            continue
        theirs = entry.theirs
        if callable(theirs):
            version = f" {results.peer_fact('vllm', 'vllm')}" if entry.peer == "vllm" else ""
            theirs = f"{PEER_NAMES[entry.peer]}{version}: {number(theirs(results))}{unit}"
            if (other := results.peer_fact(entry.peer, "gpu")) != gpu:
                gpu = f"{gpu}; {entry.peer}: {other}"
        rows.append([entry.what, f"{number(ours)}{unit}", theirs, gpu])
    return markdown(["", "Reprise", "best peer", "GPU"], rows) if rows else "Not measured yet."
