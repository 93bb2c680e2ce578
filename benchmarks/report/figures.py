"""Figures of benchmarks/results that a comparison shows, each read when it is asked for; raises Missing where it is not
measured."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.report.results import Missing, Results
from benchmarks.roofline.decoders import full_size_prefill_floor

Figure = Callable[[Results], float]


def floor_ms(row: dict[str, Any]) -> float:
    """Roofline of an encoder pass, a decode step or a prefill; results of prefills did not always have it."""
    return float(row["floor_ms"]) if "floor_ms" in row else 1e3 * full_size_prefill_floor(row["model"], row["rows"])


def over_floor(row: dict[str, Any]) -> float:
    """Multiple of the roofline: of the step, or of its bare graph where that alone was timed."""
    return float(row.get("replay_ms", row["graph_ms"])) / floor_ms(row)


def gpu_busy(row: dict[str, Any]) -> float | None:
    """Share of a load's time in which steps ran (older results: steps_share); None where it was not measured."""
    share: float | None = row.get("gpu_busy_share", row.get("steps_share"))
    return share


def of_row(result: str, key: str, **wanted: object) -> Figure:
    def figure(results: Results) -> float:
        row = results[result].row(**wanted)
        if row.get(key) is None:
            raise Missing(result, key)
        return float(row[key])

    return figure


def peer(engine: str, metric: str, **wanted: object) -> Figure:
    return lambda results: results.peer_value(engine, metric, **wanted)
