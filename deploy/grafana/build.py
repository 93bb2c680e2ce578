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


@dataclass(frozen=True)
class Dashboard:
    uid: str
    title: str
    rows: tuple[tuple[str, tuple[Panel, ...]], ...]


def quantile(metric: str, q: float, by: str = "model", selector: str = '{model=~"$model"}') -> str:
    return f"histogram_quantile({q}, sum by ({by}, le) (rate(reprise_{metric}_bucket{selector}[$__rate_interval])))"


def quantiles(metric: str, by: str = "model", selector: str = '{model=~"$model"}') -> tuple[tuple[str, str], ...]:
    label = f"{{{{{by}}}}}"
    return tuple((quantile(metric, q, by, selector), f"{label} p{round(q * 100)}") for q in (0.5, 0.95))


def rate(metric: str, by: str, selector: str = '{model=~"$model"}') -> str:
    return f"sum by ({by}) (rate(reprise_{metric}{selector}[$__rate_interval]))"


def mean(metric: str, by: str) -> tuple[tuple[str, str], ...]:
    """Since the start of the server: of what happens so rarely that no window holds enough of it."""
    total, count = (f'sum by ({by}) (reprise_{metric}_{part}{{model=~"$model"}})' for part in ("sum", "count"))
    return ((f"{total} / {count}", f"{{{{{by}}}}}"),)


def share(part: str, *others: str) -> str:
    """part / (part + others), as rates of counters by model."""
    return f"{rate(part, 'model')} / ({' + '.join(rate(metric, 'model') for metric in (part, *others))})"


def heatmap(title: str, metric: str, unit: str, description: str = "") -> Panel:
    query = f'sum by (le) (increase(reprise_{metric}_bucket{{model=~"$model"}}[$__rate_interval]))'
    return Panel(title, ((query, "{{le}}"),), unit, "heatmap", 12, description=description)


def stat(
    title: str, query: str, unit: str, thresholds: tuple[tuple[str, float | None], ...], legend: str = ""
) -> Panel:
    return Panel(title, ((query, legend),), unit, "stat", 4, 4, thresholds=thresholds)


SINCE_START = "Mean since the start of the server."
_GOOD_LOW = (("green", None),)
_ERRORS = '(sum(rate(reprise_requests_total{outcome=~"error|timeout"}[5m])) or vector(0))'
_HIT_TOKENS = rate("prefix_cache_hit_tokens_total", "model")
_QUERY_TOKENS = rate("prefix_cache_query_tokens_total", "model")

OVERVIEW = Dashboard(
    "reprise-overview",
    "Reprise / Overview",
    (
        (
            "Is it up",
            (
                stat("Ready", "min(reprise_ready)", "bool_yes_no", (("red", None), ("green", 1))),
                stat("Engine", "min(reprise_engine_up)", "bool_yes_no", (("red", None), ("green", 1))),
                stat("Requests / s", "sum(endpoint:reprise_requests:rate_5m)", "reqps", _GOOD_LOW),
                stat(
                    "Errors",
                    f"{_ERRORS} / sum(rate(reprise_requests_total[5m]))",
                    "percentunit",
                    (("green", None), ("orange", 0.005), ("red", 0.02)),
                ),
                stat("Running", "sum(reprise_requests_running)", "short", _GOOD_LOW),
                stat(
                    "Waiting", "sum(reprise_requests_waiting)", "short", (("green", None), ("orange", 8), ("red", 64))
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
                ),
                Panel(
                    "Time to first audio",
                    (
                        ('model:reprise_time_to_first_audio_seconds:p50_5m{model=~"$model"}', "{{model}} p50"),
                        ('model:reprise_time_to_first_audio_seconds:p95_5m{model=~"$model"}', "{{model}} p95"),
                    ),
                    "s",
                ),
                Panel(
                    "Real-time factor (p95)",
                    (('model:reprise_audio_realtime_factor:p95_5m{model=~"$model"}', "{{model}}"),),
                    "short",
                    thresholds=(("green", None), ("red", 0.9)),
                    description="Above 0.9 speech is made hardly faster than it is played.",
                ),
            ),
        ),
        (
            "Traffic",
            (
                Panel(
                    "Requests by outcome",
                    ((rate("requests_total", "endpoint, outcome"), "{{endpoint}} {{outcome}}"),),
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
                Panel("Request duration", quantiles("request_duration_seconds", "endpoint"), "s"),
                Panel(
                    "Tokens",
                    (
                        (rate("generated_tokens_total", "model"), "{{model}} out"),
                        (rate("prompt_tokens_total", "model, kind"), "{{model}} in {{kind}}"),
                    ),
                    "short",
                ),
                Panel(
                    "Audio made per second",
                    ((rate("audio_generated_seconds_total", "model"), "{{model}}"),),
                    "short",
                    description="Seconds of audio per second of time: how many live streams this load amounts to.",
                ),
            ),
        ),
    ),
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
                Panel("Fetch", quantiles("media_fetch_duration_seconds", "kind", ""), "s"),
                Panel("Decode", quantiles("media_decode_duration_seconds", "kind", ""), "s"),
                Panel("Preprocess", quantiles("preprocess_duration_seconds", "kind", ""), "s"),
                Panel(
                    "Refused media",
                    ((rate("media_rejections_total", "kind, reason", ""), "{{kind}} {{reason}}"),),
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
                Panel("Preemptions", ((rate("preemptions_total", "model"), "{{model}}"),), "short"),
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
                    (('model:reprise_audio_underrun:ratio_5m{model=~"$model"}', "{{model}}"),),
                    "percentunit",
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
                    ((rate("speech_rejections_total", "model, reason"), "{{reason}}"),),
                    "reqps",
                ),
                Panel(
                    "Waiting and running",
                    (
                        ('reprise_requests_waiting{model=~"$model"}', "{{model}} waiting"),
                        ('reprise_requests_running{model=~"$model"}', "{{model}} running"),
                    ),
                ),
                Panel("Parts of a step", quantiles("speech_part_duration_seconds", "part"), "s"),
                Panel("Audio encoding", quantiles("audio_encode_duration_seconds", "format", ""), "s"),
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
                Panel("Characters", ((rate("speech_characters_total", "model"), "{{model}}"),), "short", width=12),
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
                    ((rate("steps_total", "kind, reason", '{model=~"$model", route="eager"}'), "{{kind}} {{reason}}"),),
                    "ops",
                    stacked=True,
                    width=12,
                ),
                Panel("Step time", quantiles("step_duration_seconds", "kind"), "s"),
                Panel("Host time of a step", quantiles("step_host_duration_seconds", "kind"), "s"),
                Panel(
                    "Padding waste",
                    (('model:reprise_padded_rows:ratio_5m{model=~"$model"}', "{{model}} {{kind}}"),),
                    "percentunit",
                ),
                Panel("Bucket occupancy", quantiles("bucket_occupancy_ratio", "kind"), "percentunit"),
                Panel("Captures", ((rate("graph_captures_total", "kind, outcome"), "{{kind}} {{outcome}}"),), "ops"),
                Panel("Capture time", mean("graph_capture_duration_seconds", "kind"), "s", description=SINCE_START),
                Panel(
                    "Kernels compiled",
                    (("sum by (phase, cached) (reprise_kernel_compilations_total)", "{{phase}}, cached {{cached}}"),),
                    "short",
                    description="Any while serving held up every request; the log names it.",
                ),
            ),
        ),
        (
            "Memory",
            (
                Panel("Graphs", (("reprise_graph_bytes", "graphs"),), "bytes"),
                Panel("GPU memory", (("reprise_gpu_memory_bytes", "{{state}}"),), "bytes", stacked=True),
                Panel("Encoder cache", (('reprise_encoder_cache_bytes{model=~"$model"}', "{{model}}"),), "bytes"),
                Panel(
                    "KV pages in use", (('reprise_kv_cache_usage_ratio{model=~"$model"}', "{{model}}"),), "percentunit"
                ),
                Panel("KV pages", (('reprise_kv_cache_pages{model=~"$model"}', "{{model}} {{state}}"),), "short"),
                Panel("Slots", (('reprise_slots_used{model=~"$model"}', "{{model}}"),), "short"),
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
                    (('rate(process_cpu_seconds_total{job="reprise"}[$__rate_interval])', "{{instance}}"),),
                    "percentunit",
                ),
                Panel("Resident memory", (('process_resident_memory_bytes{job="reprise"}', "{{instance}}"),), "bytes"),
                Panel(
                    "File descriptors",
                    (('process_open_fds{job="reprise"}', "open"), ('process_max_fds{job="reprise"}', "limit")),
                ),
                Panel("Event loop lag", (("reprise_event_loop_lag_seconds", "{{instance}}"),), "s"),
                Panel("Event loop tasks", (("reprise_event_loop_tasks", "{{instance}}"),), "short"),
                Panel("Bytes of requests in progress", (("reprise_admitted_bytes", "{{instance}}"),), "bytes"),
                Panel(
                    "Collections",
                    (
                        (
                            'sum by (generation) (rate(python_gc_collections_total{job="reprise"}[$__rate_interval]))',
                            "generation {{generation}}",
                        ),
                    ),
                    "ops",
                ),
                Panel("Requests in progress", (("reprise_http_requests_in_progress", "{{endpoint}}"),), "short"),
                Panel(
                    "Engine restarts",
                    (("increase(reprise_engine_restarts_total[$__rate_interval])", "{{instance}}"),),
                    "short",
                ),
                Panel(
                    "Version", (("reprise_build_info", "{{version}} python {{python}} {{device}}"),), "short", "stat"
                ),
            ),
        ),
    ),
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
        "templating": {"list": [_model_variable()]},
        "links": [
            {"type": "dashboards", "tags": ["reprise"], "asDropdown": False, "title": "Reprise", "includeVars": True}
        ],
        "panels": panels,
    }


def _model_variable() -> dict[str, Any]:
    query = "label_values(reprise_requests_running, model)"
    return {
        "name": "model",
        "label": "Model",
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": "model"},
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
        defaults["custom"] = {"fillOpacity": 25 if panel.stacked else 8, "lineWidth": 1, "stacking": stacking}
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
        return {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "background", "textMode": "auto"}
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
