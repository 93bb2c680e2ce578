"""Writes dashboards/*.json: run it after a change. A test holds the files and this script together."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

DASHBOARDS = Path(__file__).parent / "dashboards"
DATASOURCE = {"type": "prometheus", "uid": "prometheus"}
SCHEMA_VERSION = 39
COLUMNS = 24

Kind = Literal["timeseries", "stat", "heatmap"]
MODEL = '{model=~"$model", instance=~"$instance"}'
"""Selector of what has a model, and of what has none."""
INSTANCE = '{instance=~"$instance"}'
SERVER = '{job="reprise", instance=~"$instance"}'
"""Of metrics that other jobs have, too."""


@dataclass(frozen=True)
class Panel:
    """One panel: queries are (PromQL, legend) pairs; `unit` is Grafana's name of a unit."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: Kind = "timeseries"
    width: int = 8
    height: int = 8
    description: str = ""
    stacked: bool = False
    thresholds: tuple[tuple[str, float | None], ...] = ()
    """Colours from a value on: of the value of a stat, as lines in a time series."""
    shows_name: bool = False
    """A stat shows its legend instead of its value."""


@dataclass(frozen=True)
class Dashboard:
    """variables: names of VARIABLES that its expressions use."""

    uid: str
    title: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]
    variables: tuple[str, ...] = ("model", "instance")


VARIABLES = {
    "model": ("Model", "label_values(reprise_requests_running, model)"),
    "instance": ("Instance", "label_values(reprise_ready, instance)"),
}


def quantile(metric: str, q: float, by: str = "model", selector: str = MODEL) -> str:
    return f"histogram_quantile({q}, sum by ({by}, le) (rate(reprise_{metric}_bucket{selector}[$__rate_interval])))"


def quantiles(metric: str, by: str = "model", selector: str = MODEL) -> tuple[tuple[str, str], ...]:
    label = f"{{{{{by}}}}}"
    return tuple((quantile(metric, q, by, selector), f"{label} p{round(q * 100)}") for q in (0.5, 0.95))


def rate(metric: str, by: str, selector: str = MODEL) -> str:
    return f"sum by ({by}) (rate(reprise_{metric}{selector}[$__rate_interval]))"


def mean(metric: str, by: str) -> tuple[tuple[str, str], ...]:
    """Since the start of the server: of what happens so rarely that no window holds enough of it."""
    total, count = (f"sum by ({by}) (reprise_{metric}_{part}{MODEL})" for part in ("sum", "count"))
    return ((f"{total} / {count}", f"{{{{{by}}}}}"),)


def share(part: str, *others: str, by: str = "model") -> str:
    """part / (part + others), as rates of counters."""
    return f"{rate(part, by)} / ({' + '.join(rate(metric, by) for metric in (part, *others))})"


def heatmap(title: str, metric: str, unit: str, description: str = "") -> Panel:
    query = f"sum by (le) (increase(reprise_{metric}_bucket{MODEL}[$__rate_interval]))"
    return Panel(title, ((query, "{{le}}"),), unit, "heatmap", 12, description=description)


def stat(
    title: str, query: str, unit: str, thresholds: tuple[tuple[str, float | None], ...], description: str = ""
) -> Panel:
    return Panel(title, ((query, ""),), unit, "stat", 4, 4, description, thresholds=thresholds)


SINCE_START = "Mean since the start of the server."
LINES = "The line is the alert's threshold."
_NEUTRAL = (("blue", None),)
_DOWN = 'up{job="reprise"} == 0'
_FAILING = '(sum(rate(reprise_requests_total{outcome=~"error|timeout"}[5m])) or vector(0))'
_ERRORS = f"({_FAILING} / (sum(rate(reprise_requests_total[5m])) > 0)) or vector(0)"
_DRY = rate("audio_streams_total", "model", MODEL.replace("{", '{underrun="true", '))
_HIT_TOKENS = rate("prefix_cache_hit_tokens_total", "model")
_QUERY_TOKENS = rate("prefix_cache_query_tokens_total", "model")

OVERVIEW = Dashboard(
    "reprise-overview",
    "Reprise / Overview",
    (
        (
            "Is it up",
            (
                stat(
                    "Ready",
                    f"min(reprise_ready or {_DOWN}) or vector(0)",
                    "bool_yes_no",
                    (("red", None), ("green", 1)),
                    "All instances are up and take requests.",
                ),
                stat(
                    "Engine",
                    f"min(reprise_engine_up or {_DOWN}) or vector(0)",
                    "bool_yes_no",
                    (("red", None), ("green", 1)),
                    "The engines of all instances live.",
                ),
                stat("Requests / s", "sum(endpoint:reprise_requests:rate_5m) or vector(0)", "reqps", _NEUTRAL),
                stat(
                    "Errors",
                    _ERRORS,
                    "percentunit",
                    (("green", None), ("orange", 0.005), ("red", 0.02)),
                    "Share of the requests of 5 minutes that the server failed, or that took too long.",
                ),
                stat("Running", "sum(reprise_requests_running) or vector(0)", "short", _NEUTRAL),
                stat(
                    "Waiting",
                    "sum(reprise_requests_waiting) or vector(0)",
                    "short",
                    (("green", None), ("orange", 8), ("red", 64)),
                ),
            ),
        ),
        (
            "Is it fast",
            (
                Panel(
                    "Time to first token",
                    (
                        ('model:reprise_time_to_first_token_seconds:p50_5m{model=~"$model"}', "{{model}} p50"),
                        ('model:reprise_time_to_first_token_seconds:p95_5m{model=~"$model"}', "{{model}} p95"),
                    ),
                    "s",
                    thresholds=(("transparent", None), ("red", 2.5)),
                    description=LINES,
                ),
                Panel(
                    "Time to first audio",
                    (
                        ('model:reprise_time_to_first_audio_seconds:p50_5m{model=~"$model"}', "{{model}} p50"),
                        ('model:reprise_time_to_first_audio_seconds:p95_5m{model=~"$model"}', "{{model}} p95"),
                    ),
                    "s",
                    thresholds=(("transparent", None), ("red", 1)),
                    description=LINES,
                ),
                Panel(
                    "Real-time factor (p95)",
                    (('model:reprise_audio_realtime_factor:p95_5m{model=~"$model"}', "{{model}}"),),
                    "short",
                    thresholds=(("transparent", None), ("red", 0.9)),
                    description="Above 0.9 speech is made hardly faster than it is played.",
                ),
            ),
        ),
        (
            "Traffic",
            (
                Panel(
                    "Requests by outcome",
                    ((rate("requests_total", "endpoint, outcome", ""), "{{endpoint}} {{outcome}}"),),
                    "reqps",
                    stacked=True,
                ),
                Panel(
                    "Rejections",
                    ((rate("admission_rejections_total", "endpoint, reason", ""), "{{endpoint}} {{reason}}"),),
                    "reqps",
                    stacked=True,
                ),
                Panel(
                    "Clients that left", ((rate("client_disconnects_total", "endpoint", ""), "{{endpoint}}"),), "reqps"
                ),
                Panel("Request duration", quantiles("request_duration_seconds", "endpoint", ""), "s"),
                Panel(
                    "Tokens / s",
                    (
                        (rate("generated_tokens_total", "model", '{model=~"$model"}'), "{{model}} out"),
                        (rate("prompt_tokens_total", "model, kind", '{model=~"$model"}'), "{{model}} in {{kind}}"),
                    ),
                    "short",
                ),
                Panel(
                    "Audio made per second",
                    ((rate("audio_generated_seconds_total", "model", '{model=~"$model"}'), "{{model}}"),),
                    "short",
                    description="Seconds of audio per second of time: how many live streams this load amounts to.",
                ),
            ),
        ),
    ),
    variables=("model",),
)

CHAT = Dashboard(
    "reprise-chat",
    "Reprise / Vision chat",
    (
        (
            "Latency",
            (
                heatmap("Time to first token", "time_to_first_token_seconds", "s"),
                heatmap("Gap between tokens", "inter_token_duration_seconds", "s"),
                Panel("Queue", quantiles("queue_duration_seconds"), "s"),
                Panel("Prefill", quantiles("prefill_duration_seconds"), "s"),
                Panel("Vision encoder pass", quantiles("vision_encode_duration_seconds"), "s"),
            ),
        ),
        (
            "Media",
            (
                Panel("Fetch", quantiles("media_fetch_duration_seconds", "kind", INSTANCE), "s"),
                Panel("Decode", quantiles("media_decode_duration_seconds", "kind", INSTANCE), "s"),
                Panel("Preprocess", quantiles("preprocess_duration_seconds", "kind", INSTANCE), "s"),
                Panel(
                    "Refused media",
                    ((rate("media_rejections_total", "kind, reason", INSTANCE), "{{kind}} {{reason}}"),),
                    "reqps",
                    stacked=True,
                ),
                Panel("Images per request", quantiles("request_images"), "short"),
                Panel("Video frames per request", quantiles("request_video_frames"), "short"),
            ),
        ),
        (
            "Sizes and caches",
            (
                Panel("Prompt positions", quantiles("request_input_tokens"), "short"),
                Panel("Generated tokens", quantiles("request_output_tokens"), "short"),
                Panel("Tokenize", quantiles("tokenize_duration_seconds"), "s"),
                Panel(
                    "Prefix cache hit ratio",
                    ((f"{_HIT_TOKENS} / {_QUERY_TOKENS}", "{{model}}"),),
                    "percentunit",
                ),
                Panel(
                    "Encoder cache hit ratio",
                    ((share("encoder_cache_hits_total", "encoder_cache_misses_total"), "{{model}}"),),
                    "percentunit",
                ),
                Panel("Preemptions / s", ((rate("preemptions_total", "model"), "{{model}}"),), "short"),
            ),
        ),
    ),
)

SPEECH = Dashboard(
    "reprise-speech",
    "Reprise / Speech",
    (
        (
            "What listeners hear",
            (
                heatmap("Time to first audio", "time_to_first_audio_seconds", "s"),
                heatmap("Real-time factor", "audio_realtime_factor", "short"),
                Panel(
                    "Streams that ran dry",
                    ((f"{_DRY} / {rate('audio_streams_total', 'model')}", "{{model}}"),),
                    "percentunit",
                    thresholds=(("transparent", None), ("red", 0.01)),
                    description=f"Share of the live streams that ended. {LINES}",
                ),
                Panel("Underrun (worst deficit)", quantiles("audio_underrun_seconds"), "s"),
                Panel("Gap between chunks", quantiles("audio_chunk_gap_seconds"), "s"),
            ),
        ),
        (
            "Scheduling",
            (
                heatmap(
                    "Slack",
                    "audio_slack_seconds",
                    "s",
                    "Least seconds of audio that any live listener has left, per tick.",
                ),
                Panel("Actual by predicted step time", quantiles("step_prediction_ratio"), "short", width=12),
                Panel(
                    "Refused by prediction",
                    ((rate("speech_rejections_total", "model, reason"), "{{model}} {{reason}}"),),
                    "reqps",
                ),
                Panel(
                    "Waiting and running",
                    (
                        (f"reprise_requests_waiting{MODEL}", "{{model}} waiting @ {{instance}}"),
                        (f"reprise_requests_running{MODEL}", "{{model}} running @ {{instance}}"),
                    ),
                ),
                Panel("Parts of a step", quantiles("speech_part_duration_seconds", "part"), "s"),
                Panel("Audio encoding", quantiles("audio_encode_duration_seconds", "format", INSTANCE), "s"),
            ),
        ),
        (
            "Volume",
            (
                Panel(
                    "Audio made per second",
                    ((rate("audio_generated_seconds_total", "model"), "{{model}}"),),
                    "short",
                    width=12,
                ),
                Panel("Characters / s", ((rate("speech_characters_total", "model"), "{{model}}"),), "short", width=12),
            ),
        ),
    ),
)

ENGINE = Dashboard(
    "reprise-engine",
    "Reprise / Engine and graphs",
    (
        (
            "Replay against eager",
            (
                Panel(
                    "Steps by route",
                    ((rate("steps_total", "kind, route"), "{{kind}} {{route}}"),),
                    "ops",
                    stacked=True,
                    width=12,
                ),
                Panel(
                    "Eager steps by reason",
                    (
                        (
                            rate("steps_total", "kind, reason", MODEL.replace("{", '{route="eager", ')),
                            "{{kind}} {{reason}}",
                        ),
                    ),
                    "ops",
                    stacked=True,
                    width=12,
                ),
                Panel("Step time", quantiles("step_duration_seconds", "kind"), "s"),
                Panel("Host time of a step", quantiles("step_host_duration_seconds", "kind"), "s"),
                Panel(
                    "Padding waste",
                    ((share("padded_rows_total", "replayed_rows_total", by="model, kind"), "{{model}} {{kind}}"),),
                    "percentunit",
                ),
                Panel("Bucket occupancy", quantiles("bucket_occupancy_ratio", "kind"), "percentunit"),
                Panel("Captures", ((rate("graph_captures_total", "kind, outcome"), "{{kind}} {{outcome}}"),), "ops"),
                Panel("Capture time", mean("graph_capture_duration_seconds", "kind"), "s", description=SINCE_START),
                Panel(
                    "Kernels compiled",
                    (
                        (
                            f"sum by (phase, cached) (reprise_kernel_compilations_total{INSTANCE})",
                            "{{phase}}, cached {{cached}}",
                        ),
                    ),
                    "short",
                    description="Any while serving held up every request; the log names it.",
                ),
            ),
        ),
        (
            "Memory",
            (
                Panel("Graphs", ((f"reprise_graph_bytes{INSTANCE}", "{{instance}}"),), "bytes"),
                Panel(
                    "GPU memory",
                    ((f"sum by (state) (reprise_gpu_memory_bytes{INSTANCE})", "{{state}}"),),
                    "bytes",
                    stacked=True,
                ),
                Panel("Encoder cache", ((f"reprise_encoder_cache_bytes{MODEL}", "{{model}} @ {{instance}}"),), "bytes"),
                Panel(
                    "KV pages in use",
                    ((f"reprise_kv_cache_usage_ratio{MODEL}", "{{model}} @ {{instance}}"),),
                    "percentunit",
                ),
                Panel("KV pages", ((f"reprise_kv_cache_pages{MODEL}", "{{model}} {{state}} @ {{instance}}"),), "short"),
                Panel("Slots", ((f"reprise_slots_used{MODEL}", "{{model}} @ {{instance}}"),), "short"),
            ),
        ),
        (
            "Start",
            (
                Panel(
                    "Model load", mean("model_load_duration_seconds", "model"), "s", width=12, description=SINCE_START
                ),
            ),
        ),
    ),
)

PROCESS = Dashboard(
    "reprise-process",
    "Reprise / API process",
    (
        (
            "Process",
            (
                Panel(
                    "CPU",
                    (
                        (
                            f"rate(process_cpu_seconds_total{SERVER}[$__rate_interval])",
                            "{{instance}}",
                        ),
                    ),
                    "percentunit",
                ),
                Panel(
                    "Resident memory",
                    ((f"process_resident_memory_bytes{SERVER}", "{{instance}}"),),
                    "bytes",
                ),
                Panel(
                    "File descriptors",
                    (
                        (f"process_open_fds{SERVER}", "{{instance}} open"),
                        (f"process_max_fds{SERVER}", "{{instance}} limit"),
                    ),
                ),
                Panel("Event loop lag", ((f"reprise_event_loop_lag_seconds{INSTANCE}", "{{instance}}"),), "s"),
                Panel("Event loop tasks", ((f"reprise_event_loop_tasks{INSTANCE}", "{{instance}}"),), "short"),
                Panel(
                    "Bytes of requests in progress", ((f"reprise_admitted_bytes{INSTANCE}", "{{instance}}"),), "bytes"
                ),
                Panel(
                    "Collections",
                    (
                        (
                            f"sum by (generation) (rate(python_gc_collections_total{SERVER}[$__rate_interval]))",
                            "generation {{generation}}",
                        ),
                    ),
                    "ops",
                ),
                Panel(
                    "Requests in progress",
                    ((f"reprise_http_requests_in_progress{INSTANCE}", "{{endpoint}} @ {{instance}}"),),
                    "short",
                ),
                Panel(
                    "Engine restarts",
                    ((f"increase(reprise_engine_restarts_total{INSTANCE}[$__rate_interval])", "{{instance}}"),),
                    "short",
                ),
            ),
        ),
        (
            "What runs",
            (
                Panel(
                    "Version",
                    ((f"reprise_build_info{INSTANCE}", "{{version}}, Python {{python}}, torch {{torch}}"),),
                    "short",
                    "stat",
                    12,
                    4,
                    thresholds=_NEUTRAL,
                    shows_name=True,
                ),
                Panel(
                    "Device",
                    ((f"reprise_engine_info{INSTANCE}", "{{device}}"),),
                    "short",
                    "stat",
                    12,
                    4,
                    thresholds=_NEUTRAL,
                    shows_name=True,
                ),
            ),
        ),
    ),
    variables=("instance",),
)

ALL = (OVERVIEW, CHAT, SPEECH, ENGINE, PROCESS)


def render(dashboard: Dashboard) -> dict[str, Any]:
    """Grafana's JSON: rows of panels, left to right, wrapped at the grid's width."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in dashboard.rows:
        panels.append(_row(title, len(panels) + 1, y))
        y += 1
        x, height = 0, 0
        for panel in row:
            if x + panel.width > COLUMNS:
                x, y, height = 0, y + height, 0
            panels.append(_panel(panel, len(panels) + 1, x, y))
            x, height = x + panel.width, max(height, panel.height)
        y += height
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "tags": ["reprise"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_variable(name) for name in dashboard.variables]},
        "links": [
            {"type": "dashboards", "tags": ["reprise"], "asDropdown": False, "title": "Reprise", "includeVars": True}
        ],
        "panels": panels,
    }


def _variable(name: str) -> dict[str, Any]:
    label, query = VARIABLES[name]
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "refresh": 2,
        "current": {"text": "All", "value": "$__all"},
    }


def _row(title: str, identity: int, y: int) -> dict[str, Any]:
    grid = {"h": 1, "w": COLUMNS, "x": 0, "y": y}
    return {"id": identity, "type": "row", "title": title, "gridPos": grid, "collapsed": False, "panels": []}


def _panel(panel: Panel, identity: int, x: int, y: int) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit}
    if panel.thresholds:
        steps = [{"color": color, "value": value} for color, value in panel.thresholds]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    if panel.kind == "timeseries":
        stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
        drawn = {"mode": "line" if panel.thresholds else "off"}
        fill = 25 if panel.stacked else 8
        defaults["custom"] = {
            "fillOpacity": fill,
            "lineWidth": 1,
            "stacking": stacking,
            "thresholdsStyle": drawn,
        }
        defaults["min"] = 0
    return {
        "id": identity,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": {"h": panel.height, "w": panel.width, "x": x, "y": y},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": _options(panel),
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": DATASOURCE,
                "expr": query,
                "legendFormat": legend,
                "format": "heatmap" if panel.kind == "heatmap" else "time_series",
            }
            for index, (query, legend) in enumerate(panel.queries)
        ],
    }


def _options(panel: Panel) -> dict[str, Any]:
    if panel.kind == "stat":
        shown = "name" if panel.shows_name else "value"
        return {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "background", "textMode": shown}
    if panel.kind == "heatmap":
        return {"calculate": False, "cellGap": 1, "yAxis": {"unit": panel.unit}, "color": {"scheme": "Oranges"}}
    return {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}}


def text(dashboard: Dashboard) -> str:
    return json.dumps(render(dashboard), indent=2, sort_keys=True) + "\n"


def main() -> None:
    for dashboard in ALL:
        (DASHBOARDS / f"{dashboard.uid.removeprefix('reprise-')}.json").write_text(text(dashboard))


if __name__ == "__main__":
    main()
