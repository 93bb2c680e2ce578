"""Writes dashboards/*.json: run `python -m deploy.grafana.build` after a change. A test compares the files with it.

Each file can be imported into any Grafana: a variable picks the Prometheus to ask.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from deploy.grafana.contents import ALL
from deploy.grafana.panels import INSTANCE, SERVER, VARIABLES, Dashboard, Panel, only

DASHBOARDS = Path(__file__).parent / "dashboards"
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
SCHEMA_VERSION = 39
COLUMNS = 24

_SERVING = only('phase="serving"', INSTANCE)
ANNOTATIONS = (
    ("Engine restarted", "red", f"changes(reprise_engine_restarts_total{INSTANCE}[1m]) > 0"),
    ("Server started", "blue", f"changes(process_start_time_seconds{SERVER}[1m]) > 0"),
    (
        "Kernel compiled while serving",
        "orange",
        f"sum by (instance) (changes(reprise_kernel_compilations_total{_SERVING}[1m])) > 0",
    ),
)
"""(name, colour, PromQL): every dashboard is marked wherever the expression has a value."""


def render(dashboard: Dashboard) -> dict[str, Any]:
    """Returns Grafana's JSON, in which the panels of a row run from left to right and wrap at the grid's width."""
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
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "browser",
        "templating": {"list": [_datasource(), *(_variable(name) for name in dashboard.variables)]},
        "annotations": {"list": [_annotation(*annotation) for annotation in ANNOTATIONS]},
        "links": [
            {"type": "dashboards", "tags": ["reprise"], "asDropdown": False, "title": "Reprise", "includeVars": True}
        ],
        "panels": panels,
    }


def _datasource() -> dict[str, Any]:
    """The variable that picks the Prometheus to ask. Grafana offers all that it knows and starts with its default."""
    return {
        "name": "datasource",
        "label": "Prometheus",
        "type": "datasource",
        "query": "prometheus",
        "refresh": 1,
        "includeAll": False,
        "multi": False,
        "current": {},
    }


def _annotation(name: str, color: str, expression: str) -> dict[str, Any]:
    return {
        "name": name,
        "datasource": DATASOURCE,
        "enable": True,
        "iconColor": color,
        "expr": expression,
        "step": "1m",
        "titleFormat": f"{name}: {{{{instance}}}}",
        "target": {"refId": "Annotation", "expr": expression, "interval": "1m"},
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
        # No pattern tells the kinds of model apart, so "all" of one kind means the models that the query found.
        "allValue": None if name in ("chat_model", "speech_model") else ".*",
        "multi": True,
        "refresh": 2,
        "current": {"text": "All", "value": "$__all"},
    }


def _row(title: str, identity: int, y: int) -> dict[str, Any]:
    grid = {"h": 1, "w": COLUMNS, "x": 0, "y": y}
    return {"id": identity, "type": "row", "title": title, "gridPos": grid, "collapsed": False, "panels": []}


ALERT_LIST = {
    "alertName": "Reprise",
    "dashboardAlerts": False,
    "groupMode": "default",
    "maxItems": 40,
    "sortOrder": 3,
    "stateFilter": {"firing": True, "pending": True, "normal": False, "noData": False, "error": True},
    "viewMode": "list",
}
"""Lists the alerts of every data source that evaluates rules. sortOrder 3 puts the most important first."""


def _panel(panel: Panel, identity: int, x: int, y: int) -> dict[str, Any]:
    grid = {"h": panel.height, "w": panel.width, "x": x, "y": y}
    if panel.kind == "alertlist":
        return {
            "id": identity,
            "type": panel.kind,
            "title": panel.title,
            "description": panel.description,
            "gridPos": grid,
            "options": ALERT_LIST,
        }
    defaults: dict[str, Any] = {"unit": panel.unit}
    if panel.thresholds:
        steps = [{"color": color, "value": value} for color, value in panel.thresholds]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    if panel.kind == "timeseries":
        stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
        drawn = {"mode": "line" if panel.thresholds else "off"}
        fill = 25 if panel.stacked else 8
        defaults["custom"] = {"fillOpacity": fill, "lineWidth": 1, "stacking": stacking, "thresholdsStyle": drawn}
        defaults["min"] = 0
    return {
        "id": identity,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": grid,
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
