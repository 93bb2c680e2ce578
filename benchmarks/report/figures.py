"""Figures of benchmarks/results that a comparison shows, each read when it is asked for; raises Missing where it is not
measured."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.report.results import Missing, Results

Figure = Callable[[Results], float]


def of_row(result: str, key: str, **wanted: object) -> Figure:
    def figure(results: Results) -> float:
        row = results[result].row(**wanted)
        if row.get(key) is None:
            raise Missing(result, key)
        return float(row[key])

    return figure


def peer(engine: str, metric: str, **wanted: object) -> Figure:
    return lambda results: results.peer_value(engine, metric, **wanted)
