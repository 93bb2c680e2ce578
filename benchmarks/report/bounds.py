"""What the best measured kernels allow a step: all of its GEMMs and its attention, and nothing between them.

GEMMs are the fastest of everything in benchmarks/results/kernels at these shapes, cuBLAS included, or without such a
measurement those of the step's own profile, which the routes chose as the fastest. Attention is cuDNN's dense kernel or
ours, whichever is faster, or that of the profile.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.measure.kernel_times import grouped
from benchmarks.report.results import Missing, Result, Results
from benchmarks.report.targets import StepOf

GEMMS = (
    "gemms",
    "gemms_locdit_gate_up",
    "gemms_qwen2b_prefill",
    "gemms_voxcpm2_lm_prefill",
    "e4m3_qwen2b",
    "e4m3_qwen7b",
    "heads",
)
ATTENTION = ("attention", "attention_one_segment", "attention_paged_decode")
STACKS = {"qwen2_vl_2b": ("qwen2b", "qwen2-vl 2b", 28), "qwen2_vl_7b": ("qwen7b", "qwen2-vl 7b", 28)}
"""Names of a language model and of its head in the kernels' results, and its number of layers."""
LOCDIT_ROWS, LOCDIT_LAYERS, LM_LAYERS = 22, 12 * 9, 28 + 8
"""Of VoxCPM2: rows of a stream, layers of nine evaluations of the solver, and layers of both language models."""

_TOWERS = {
    "qwen2_vl_2b": (32, 80),
    "kimi_vl_a3b": (27, 72),
    "minicpmv_4_5": (27, 72),
    "qwen3_vl_2b": (24, 64),
    "qwen3_vl_4b": (24, 64),
    "qwen3_vl_8b": (27, 72),
    "qwen3_vl_30b_a3b": (27, 72),
}
"""Layers of an encoder that attend to whole pictures, and values of each of their 16 heads."""
_SEGMENTS = {
    ("qwen2_vl_2b", "224x224"): "1 x 256",
    ("qwen2_vl_2b", "448x448"): "1 x 1024",
    ("qwen2_vl_2b", "1024x1024"): "5476 of 5504",
    ("kimi_vl_a3b", "448x448"): "1 x 1024",
    ("minicpmv_4_5", "448x448"): "1 x 1024",
    **{(f"qwen3_vl_{size}", "1024x1024"): "4096 of 4096" for size in ("2b", "4b", "8b", "30b_a3b")},
    **{(f"qwen3_vl_{size}", "1920x1080"): "8160 of 8192" for size in ("2b", "4b", "8b", "30b_a3b")},
}
"""An input's attention in the kernels' results, where it was measured."""


@dataclass(frozen=True)
class Bound:
    """Milliseconds of a step's GEMMs and attention, None where neither kernels nor a profile tell them. profile: name
    of the result that was read for it."""

    gemms_ms: float | None
    attention_ms: float | None
    profile: str = ""

    @property
    def all_ms(self) -> float | None:
        if self.gemms_ms is None:
            return None
        return self.gemms_ms + (self.attention_ms or 0.0)


def bound_of(results: Results, step: StepOf) -> Bound:
    gemms, attention = _measured_gemms(results, step), _measured_attention(results, step)
    profile = profile_of(results, step)
    if profile is None:
        return Bound(gemms, attention)
    groups = grouped(_of_size(profile, step))
    least = min((ms for ms in (attention, groups.get("attention")) if ms is not None), default=None)
    return Bound(groups["GEMMs"] if gemms is None else gemms, least, profile.name)


def profile_of(results: Results, step: StepOf) -> Result | None:
    """Of benchmarks.replay_profile; earlier ones have several sizes in a file."""
    kind = "" if step.kind == "decode" else f"_{step.kind}"
    size = re.sub(r"^(\d+) frames .*", r"\1f", step.size)
    square = re.fullmatch(r"(\d+)x\1", size)
    for name in (size, *([square[1]] if square else [])):
        try:
            return results[f"replay_profile_{step.model}{kind}_{name}"]
        except Missing:
            continue
    try:
        result = results[f"replay_profile_{step.model}{kind}"]
    except Missing:
        return None
    return result if _of_size(result, step) else None


def _of_size(result: Result, step: StepOf) -> list[dict[str, Any]]:
    side = step.size.split("x")[0]
    return [row for row in result.rows if "size" not in row or str(row["size"]) == side]


def _measured_gemms(results: Results, step: StepOf) -> float | None:
    if step.kind == "encoder":
        return None
    rows = int(step.size)
    if step.model == "voxcpm2":
        locdit = _layer(results, "locdit", LOCDIT_ROWS * rows)
        lms = _layer(results, "voxcpm2 lm", rows)
        return None if locdit is None or lms is None else (LOCDIT_LAYERS * locdit + LM_LAYERS * lms) / 1e3
    if step.model not in STACKS:
        return None
    name, head, layers = STACKS[step.model]
    each = _layer(results, name, rows)
    if each is None or step.kind == "prefill":
        return None if each is None else layers * each / 1e3
    last = _least(results, GEMMS, (f"{head}, {rows} rows", f"{name} head, {rows} rows"))
    return None if last is None else (layers * each + last) / 1e3


def _layer(results: Results, stack: str, rows: int) -> float | None:
    """Microseconds of a layer's four GEMMs."""
    total = 0.0
    for part in ("qkv", "out", "gate_up", "down"):
        names = (f"{stack} {part}, {rows} rows", f"{stack} prefill {part}, {rows} rows")
        least = _least(results, GEMMS, names)
        if least is None:
            return None
        total += least
    return total


def _measured_attention(results: Results, step: StepOf) -> float | None:
    if step.kind == "encoder":
        segments = _SEGMENTS.get((step.model, step.size))
        if segments is None:
            return None
        layers, width = _TOWERS[step.model]
        each = _least(results, ATTENTION, (f"{segments}, 16 x {width}",))
    elif step.model in STACKS:
        name, _, layers = STACKS[step.model]
        prompt = f"1 x {step.size}, 12 x 128" if step.model == "qwen2_vl_2b" else ""
        each = _least(results, ATTENTION, (prompt if step.kind == "prefill" else f"{name}, {step.size} x 512",))
    else:
        return None
    return None if each is None else layers * each / 1e3


def _least(results: Results, files: tuple[str, ...], shapes: tuple[str, ...]) -> float | None:
    """Microseconds of the fastest variant with 16-bit operands; None where no shape was measured."""
    found = (
        float(row["median_us"])
        for row in _kernel_rows(results, files)
        if row["shape"] in shapes and row["variant"] != "lengthening alone"
    )
    return min(found, default=None)


def _kernel_rows(results: Results, files: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    for name in files:
        try:
            rows = results[f"kernels/{name}"].rows
        except Missing:
            continue
        yield from (row for row in rows if not name.startswith("e4m3") or row["variant"] == "bfloat16")
