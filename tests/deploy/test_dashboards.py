"""Dashboards and rules: in step with their source, and about metrics that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from deploy.grafana import build
from service.metrics import SPECS, Metrics
from tests.deploy.promql import DASHBOARDS, expressions, grouping_in, metrics_in, recorded, rules, selectors_in

_TARGET_LABELS = {"instance", "job"}


def exposed() -> dict[str, set[str]]:
    """Sample names that a scrape can show, with their labels."""
    names: dict[str, set[str]] = {"up": set(), "python_gc_collections_total": {"generation"}}
    families = text_string_to_metric_families(Metrics().exposition().decode())
    names |= {sample.name: set(sample.labels) for family in families for sample in family.samples}
    for spec in SPECS:
        suffixes = ("_bucket", "_sum", "_count") if spec.kind == "histogram" else ("",)
        for suffix in suffixes:
            names[f"reprise_{spec.name}{suffix}"] = {*spec.labels, *({"le"} if suffix == "_bucket" else ())}
    return names


@pytest.mark.parametrize(("where", "expression"), expressions())
def test_expressions_use_metrics_and_labels_that_exist(where: str, expression: str) -> None:
    names = exposed()
    used = metrics_in(expression)
    assert used, where
    for name in used:
        assert name in names or name in recorded(), f"{where}: {name} is exposed nowhere"
    for name, labels in selectors_in(expression):
        assert labels <= names[name] | _TARGET_LABELS, f"{where}: labels of {name}"
    grouped = grouping_in(expression)
    allowed = {label for name in used for label in names.get(name, {"model", "kind", "endpoint"})}
    assert grouped <= allowed | _TARGET_LABELS, f"{where}: grouped by {grouped - allowed}"


def test_dashboards_are_what_the_script_writes() -> None:
    written = {path.name: path.read_text() for path in DASHBOARDS}
    assert written == {f"{d.uid.removeprefix('reprise-')}.json": build.text(d) for d in build.ALL}


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_panels_have_ids_of_their_own_and_do_not_overlap(path: Path) -> None:
    panels = json.loads(path.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: dict[tuple[int, int], str] = {}
    for panel in panels:
        grid = panel["gridPos"]
        assert grid["x"] + grid["w"] <= 24
        for x in range(grid["x"], grid["x"] + grid["w"]):
            for y in range(grid["y"], grid["y"] + grid["h"]):
                assert (x, y) not in cells, f"{panel['title']} lies over {cells[x, y]}"
                cells[x, y] = panel["title"]


def test_every_metric_is_shown_somewhere() -> None:
    text = " ".join(expression for _, expression in expressions())
    unseen = [spec.name for spec in SPECS if f"reprise_{spec.name}" not in text]
    assert not unseen


def test_latency_thresholds_lie_on_bucket_bounds() -> None:
    buckets = {f"reprise_{spec.name}": spec.buckets for spec in SPECS if spec.buckets}
    checked = 0
    for rule in rules():
        match = re.fullmatch(r"model:(reprise_\w+):p95_5m > ([\d.]+)", rule.get("expr", ""))
        if match:
            assert float(match[2]) in buckets[match[1]], rule["alert"]
            checked += 1
    assert checked >= 3


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_variables_are_declared_and_used(path: Path) -> None:
    board = json.loads(path.read_text())
    declared = {variable["name"] for variable in board["templating"]["list"]}
    text = " ".join(target["expr"] for panel in board["panels"] for target in panel.get("targets", ()))
    assert set(re.findall(r"\$(?!__)(\w+)", text)) == declared


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_what_is_drawn_can_be_told_apart(path: Path) -> None:
    """A legend for each label that a query keeps; thresholds that Grafana draws; stats that are never empty."""
    for panel in json.loads(path.read_text())["panels"]:
        defaults = panel.get("fieldConfig", {}).get("defaults", {})
        if panel["type"] == "timeseries":
            drawn = defaults["custom"]["thresholdsStyle"]["mode"]
            assert (drawn == "line") == ("thresholds" in defaults), panel["title"]
            for target in panel["targets"]:
                kept = {label for label in grouping_in(target["expr"]) if label != "le"}
                shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
                assert kept <= shown and shown, panel["title"]
                if "(" not in target["expr"] and "model:" not in target["expr"]:
                    assert "instance" in shown, f"{panel['title']}: instances look alike"
        elif panel["type"] == "stat" and panel["options"]["textMode"] == "value":
            assert all("or vector(0)" in target["expr"] for target in panel["targets"]), panel["title"]


def test_lines_are_drawn_where_alerts_fire() -> None:
    panels = [panel for board in DASHBOARDS for panel in json.loads(board.read_text())["panels"]]
    lines = {panel["title"]: panel["fieldConfig"]["defaults"] for panel in panels if panel["type"] == "timeseries"}
    drawn = {
        title: defaults["thresholds"]["steps"][-1]["value"]
        for title, defaults in lines.items()
        if "thresholds" in defaults
    }
    alerts = {
        rule["alert"]: float(re.findall(r"> ([\d.]+)", rule["expr"])[-1])
        for rule in rules()
        if "alert" in rule and ">" in rule["expr"]
    }
    assert drawn == {
        "Time to first token": alerts["RepriseSlowFirstToken"],
        "Time to first audio": alerts["RepriseSlowFirstAudio"],
        "Real-time factor (p95)": alerts["RepriseSpeechSlowerThanPlayback"],
        "Streams that ran dry": alerts["RepriseUnderruns"],
    }
