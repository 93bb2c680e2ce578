"""What a panel and a dashboard are, and the PromQL that panels are made from.

The lines that panels draw are the thresholds of the alerts (prometheus/rules/thresholds.yml).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import yaml

THRESHOLDS = Path(__file__).parents[1] / "prometheus/rules/thresholds.yml"

Kind = Literal["timeseries", "stat", "heatmap", "alertlist"]
MODEL = '{model=~"$model", instance=~"$instance"}'
CHAT_MODEL = '{model=~"$chat_model", instance=~"$instance"}'
SPEECH_MODEL = '{model=~"$speech_model", instance=~"$instance"}'
"""Selectors for metrics labelled with a model: any model, or those of one kind. Panels of steps need the latter, since
chat and speech share the names of step kinds but nothing else."""
INSTANCE = '{instance=~"$instance"}'
SERVER = '{job="reprise", instance=~"$instance"}'
"""For metrics that other jobs expose as well."""


@dataclass(frozen=True)
class Panel:
    """One panel. `queries` are (PromQL, legend) pairs, `unit` is Grafana's name for a unit, sizes are in grid cells."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: Kind = "timeseries"
    width: int = 8
    height: int = 8
    description: str = ""
    stacked: bool = False
    thresholds: tuple[tuple[str, float | None], ...] = ()
    """(colour, the value it starts at): a stat takes the colour of its value, a time series draws them as lines."""
    shows_name: bool = False
    """Makes a stat show its legend instead of its value."""


@dataclass(frozen=True)
class Dashboard:
    """`variables` names those of VARIABLES that its expressions use."""

    uid: str
    title: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]
    variables: tuple[str, ...] = ("model", "instance")


QUANTILES = (0.5, 0.95, 0.99)
VARIABLES = {
    "model": ("Model", "label_values(reprise_requests_running, model)"),
    "chat_model": ("Chat model", "label_values(reprise_time_to_first_token_seconds_count, model)"),
    "speech_model": ("Speech model", "label_values(reprise_audio_streams_total, model)"),
    "instance": ("Instance", "label_values(reprise_ready, instance)"),
}


def only(matcher: str, selector: str) -> str:
    """Adds a matcher to `selector`."""
    return selector.replace("{", "{" + matcher + ", ")


def quantile(metric: str, q: float, by: str = "model", selector: str = MODEL) -> str:
    return f"histogram_quantile({q}, sum by ({by}, le) (rate(reprise_{metric}_bucket{selector}[$__rate_interval])))"


def quantiles(metric: str, by: str = "model", selector: str = MODEL) -> tuple[tuple[str, str], ...]:
    label = " ".join(f"{{{{{name}}}}}" for name in by.split(", "))
    return tuple((quantile(metric, q, by, selector), f"{label} p{round(q * 100)}") for q in QUANTILES)


def rate(metric: str, by: str, selector: str = MODEL) -> str:
    return f"sum by ({by}) (rate(reprise_{metric}{selector}[$__rate_interval]))"


def mean(metric: str, by: str) -> tuple[tuple[str, str], ...]:
    """The mean since the server started, for events too rare for any window to hold enough of them."""
    total, count = (f"sum by ({by}) (reprise_{metric}_{part}{MODEL})" for part in ("sum", "count"))
    return ((f"{total} / {count}", " ".join(f"{{{{{name}}}}}" for name in by.split(", "))),)


def share(part: str, *others: str, by: str = "model", selector: str = MODEL) -> str:
    """part / (part + others), as rates of counters."""
    return f"{rate(part, by, selector)} / ({' + '.join(rate(metric, by, selector) for metric in (part, *others))})"


def heatmap(title: str, metric: str, unit: str, selector: str, description: str = "") -> Panel:
    query = f"sum by (le) (increase(reprise_{metric}_bucket{selector}[$__rate_interval]))"
    return Panel(title, ((query, "{{le}}"),), unit, "heatmap", 12, description=description)


def stat(
    title: str, query: str, unit: str, thresholds: tuple[tuple[str, float | None], ...], description: str = ""
) -> Panel:
    return Panel(title, ((query, ""),), unit, "stat", 4, 4, description, thresholds=thresholds)


def line(alert: str) -> tuple[tuple[str, float | None], ...]:
    """Thresholds that colour a panel red from the alert's threshold on."""
    groups = yaml.safe_load(THRESHOLDS.read_text())["groups"]
    named = {rule["labels"]["alert"]: rule["expr"] for group in groups for rule in group["rules"]}
    return (("transparent", None), ("red", float(named[alert].removeprefix("vector(").removesuffix(")"))))
