"""The plots of the documentation, made from benchmarks/results. Drawing needs matplotlib; their data do not.

The files are SVG with a transparent background and colours of medium lightness, readable on white and on dark. They
contain the digest of their data, so that a check without matplotlib can tell whether they are up to date.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.commands import COMMANDS
from benchmarks.report.formatting import model_name
from benchmarks.report.results import Missing, Results

Points = list[tuple[float, float]]
Series = dict[str, Points]
"""Points by the name of the line that they are on."""
Panels = dict[str, Series]

INK = "#7d8590"
COLOURS = ("#2f81f7", "#db6d28", "#8957e5", "#3fb950", "#d4a72c", "#e85aad", "#39a8b8", "#9a6b4f", "#8a94a6", "#b3c23a")


@dataclass(frozen=True)
class Axes:
    """One panel. log_x, log_y: scales. line: a target, drawn across, with its name. top: end of y."""

    x: str
    y: str
    log_x: bool = False
    log_y: bool = False
    line: tuple[float, str] | None = None
    top: float | None = None


@dataclass(frozen=True)
class Plot:
    name: str
    caption: str
    series: Callable[[Results], Panels]
    axes: dict[str, Axes]


def digest(panels: Panels) -> str:
    return "data " + hashlib.sha256(json.dumps(panels, sort_keys=True).encode()).hexdigest()[:32]


def draw(plot: Plot, results: Results, path: Path) -> None:
    """Raises Missing."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    panels = plot.series(results)
    settings: dict[Any, object] = {
        "svg.hashsalt": plot.name,
        "svg.fonttype": "none",
        "font.family": "sans-serif",
        "font.size": 9,
    }
    settings |= dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)
    names = dict.fromkeys(name for series in panels.values() for name in series)
    colours = dict(zip(names, itertools.cycle(COLOURS), strict=False))
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(4.6 * len(panels), 3.3), layout="constrained")
        for panel, (title, series) in zip(
            figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
        ):
            axes = plot.axes[title]
            for name, points in series.items():
                x, y = zip(*points, strict=True)
                style = "--" if name == "roofline" else "-"
                panel.plot(x, y, style, marker="o", markersize=4, color=colours[name], label=name)
            if axes.line:
                panel.axhline(axes.line[0], color=INK, linewidth=1, linestyle=":", label=axes.line[1])
            if axes.log_x:
                panel.set_xscale("log", base=2)
                panel.xaxis.set_major_locator(LogLocator(base=2, numticks=8))
            if axes.log_y:
                panel.set_yscale("log")
                panel.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                panel.yaxis.set_minor_locator(NullLocator())
            for axis in (panel.xaxis, panel.yaxis):
                axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            panel.set(xlabel=axes.x, ylabel=axes.y, title=title)
            panel.set_ylim(bottom=None if axes.log_y else 0, top=axes.top)
            panel.grid(color=INK, alpha=0.25, linewidth=0.6)
            panel.spines[["top", "right"]].set_visible(False)
            panel.legend(frameon=False, fontsize=8)
        path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Date": None, "Description": digest(panels), "Creator": None}
        figure.savefig(path, transparent=True, metadata=metadata)


def _peer_points(results: Results, engine: str, metric: str) -> Points:
    points = []
    for streams in (1, 8, 16, 32, 64):
        try:
            points.append((float(streams), results.peer_value(engine, metric, batch=streams)))
        except LookupError:
            continue
    return points


def _peer_throughput(results: Results, engine: str) -> Points:
    """One stream's is the reciprocal of its real-time factor."""
    return [(1.0, 1 / results.peer_value(engine, "rtf", batch=1)), *_peer_points(results, engine, "xrt")]


def _speech_streams(results: Results) -> Panels:
    rows = [row for row in results["speech_http_closed"].rows if row["succeeded"]]

    def ours(key: str) -> Points:
        return [(float(row["streams"]), float(row[key])) for row in rows]

    throughput: Series = {
        "Reprise, through HTTP": ours("audio_s_per_s"),
        "nano-vllm-voxcpm, in process": _peer_throughput(results, "nano-vllm-voxcpm"),
        "vllm-omni": _peer_throughput(results, "vllm-omni"),
    }
    try:
        steps = results["speech_steps"].rows
        throughput["roofline"] = [(float(r["streams"]), 160 * r["streams"] / r["floor_ms"]) for r in steps]
    except Missing:
        pass
    first: Series = {
        "Reprise, through HTTP": ours("first_p50_ms"),
        "nano-vllm-voxcpm, in process": _peer_points(results, "nano-vllm-voxcpm", "ttfc_ms"),
        "vllm-omni": _peer_points(results, "vllm-omni", "ttfc_ms"),
        "Reprise, through HTTP, p95": ours("first_p95_ms"),
    }
    return {"throughput": throughput, "first audio": first}


_CHATS = "Qwen2-VL-7B, 8 pictures a prompt"


def _chat_rate(results: Results) -> Panels:
    rows = [row for row in results["chat_http_arrivals_qwen2_vl_7b"].rows if row["succeeded"]]
    times = ("mean", "p50", "p99")
    return {_CHATS: {time: [(float(r["rate"]), float(r[f"first_{time}_ms"])) for r in rows] for time in times}}


def _roofline(results: Results) -> Panels:
    """Roofline by time of encoder passes and decode steps through the runner; Missing without any of either."""
    encoders: Series = {}
    decodes: Series = {}
    for command in COMMANDS:
        kind = command.result.split("_")[0]
        if kind not in ("encoder", "decode"):
            continue
        try:
            result = results[command.result]
        except Missing:
            continue
        size = "patches" if kind == "encoder" else "rows"
        steps = [row for row in result.rows if "floor_ms" in row and row.get("kind") != "prefill"]
        points = [(float(row[size]), row["floor_ms"] / row["replay_ms"]) for row in steps]
        name = model_name(result, command.result.removeprefix(f"{kind}_"))
        (encoders if kind == "encoder" else decodes)[name] = sorted(points)
    try:
        speech = results["speech_steps"].rows
        decodes["VoxCPM2"] = sorted((float(r["streams"]), r["floor_ms"] / r["decode_ms"]) for r in speech)
    except Missing:
        pass
    if not encoders or not decodes:
        raise Missing(COMMANDS[0].result)
    return {"encoders": encoders, "decode steps": decodes}


PLOTS = {
    plot.name: plot
    for plot in (
        Plot(
            "speech_streams",
            "Speech: seconds of audio per second, and time to first audio, against streams",
            _speech_streams,
            {
                "throughput": Axes("streams", "seconds of audio per second", log_x=True, log_y=True),
                "first audio": Axes("streams", "time to first audio, ms", log_x=True),
            },
        ),
        Plot(
            "chat_rate",
            "Vision chat: TTFT against the rate of prompts",
            _chat_rate,
            {_CHATS: Axes("prompts/s", "TTFT, ms", line=(300, "300 ms"), log_y=True)},
        ),
        Plot(
            "roofline",
            "How near encoders and decode steps come to the roofline (1: on it)",
            _roofline,
            {
                "encoders": Axes("patches", "roofline / measured", log_x=True, top=1),
                "decode steps": Axes("rows or streams", "roofline / measured", log_x=True, top=1),
            },
        ),
    )
}
