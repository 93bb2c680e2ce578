"""How numbers, names and tables are written in the documentation."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.commands import BY_RESULT
from benchmarks.report.results import Missing, Result, Results
from service.cli.bench.report import markdown, number

NAMES = {
    "qwen2_vl_2b": "Qwen2-VL-2B",
    "qwen2_vl_7b": "Qwen2-VL-7B",
    "qwen2_5_vl_3b": "Qwen2.5-VL-3B",
    "qwen2_5_vl_7b": "Qwen2.5-VL-7B",
    "minicpmv_4_5": "MiniCPM-V 4.5",
    "minicpmv_4_6": "MiniCPM-V 4.6",
    "kimi_vl_a3b": "Kimi-VL-A3B",
    "qwen3_vl_2b": "Qwen3-VL-2B",
    "qwen3_vl_4b": "Qwen3-VL-4B",
    "qwen3_vl_8b": "Qwen3-VL-8B",
    "qwen3_vl_30b_a3b": "Qwen3-VL-30B-A3B",
    "qwen3_5_4b": "Qwen3.5-4B",
    "qwen3_5_27b": "Qwen3.5-27B",
    "qwen3_5_35b_a3b": "Qwen3.5-35B-A3B",
    "qwen3_asr_0_6b": "Qwen3-ASR-0.6B",
    "qwen3_asr_1_7b": "Qwen3-ASR-1.7B",
    "voxcpm2": "VoxCPM2",
}


PEER_NAMES = {"vllm": "vLLM", "nano-vllm-voxcpm": "nano-vllm-voxcpm"}


def absent(name: str) -> str:
    """In place of a result: how it is measured, where there is still a command."""
    written = f": `{BY_RESULT[name].command}` writes" if name in BY_RESULT else ","
    return f"Not measured yet{written} `{name}.json`."


def sides(text: str) -> str:
    return re.sub(r"(\d+)x(\d+)", r"\1 x \2", text)


def device_mark(result: Result) -> str:
    """What follows a name in a table of the H100's figures whose row is of another device."""
    name = str(result.facts["device"]["name"])
    return "" if "H100" in name else f", {name.removeprefix('NVIDIA ')}"


def model_name(result: Result, model: str) -> str:
    """Of a row of `result`, with its device where that is not an H100."""
    return NAMES[model] + device_mark(result)


def server_of(result: Result) -> str:
    """What was under a load of benchmarks.serving: the engine, its version, its API processes where there are more."""
    engine = " ".join(filter(None, (result.facts["engine"], result.facts["engine_version"])))
    count = result.facts["api_processes"] or 1
    return f"{engine}, {count} API processes" if count > 1 else engine


def spread(row: dict[str, Any], name: str) -> str:
    """Median with the 10th to the 90th percentile; the median alone where a row has no more, "" without one."""
    if f"{name}_p10_ms" not in row:
        return number(row[f"{name}_ms"]) if f"{name}_ms" in row else ""
    return f"{number(row[f'{name}_ms'])} ({number(row[f'{name}_p10_ms'])} to {number(row[f'{name}_p90_ms'])})"


def sourced_table(
    results: Results, names: Sequence[str], block: Callable[[Result], list[list[str]]], head: list[str]
) -> str:
    """One table of what there is, then where it comes from, then what there is not."""
    rows: list[list[str]] = []
    sources, missing = [], []
    for name in names:
        try:
            result = results[name]
        except Missing:
            missing.append(absent(name))
            continue
        if found := block(result):
            rows += found
            sources.append(result.source)
    table = [markdown(head, rows), "\n".join(f"- {source}" for source in sources)] if rows else []
    return "\n\n".join([*table, *missing])


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f} %"
