"""Dashboards and rules: in step with their source, and about metrics that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from deploy.grafana import build
from service.metrics.metrics import SPECS, Metrics
from tests.deploy.promql import (
    DASHBOARDS,
    captured,
    expressions,
    grouping_in,
    metrics_in,
    rules,
    selectors_in,
    thresholds,
)

ROOT = Path(__file__).parents[2]
ALERTS_PAGE = ROOT / "docs/alerts.md"

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


def test_expressions_use_metrics_and_labels_that_exist() -> None:
    names = exposed()
    for where, expression in expressions():
        used = metrics_in(expression)
        assert used, where
        for name in used:
            assert name in names or name in captured(), f"{where}: {name} is exposed nowhere"
        for name, labels in selectors_in(expression):
            assert labels <= names[name] | _TARGET_LABELS, f"{where}: labels of {name}"
        grouped = grouping_in(expression)
        allowed = {label for name in used for label in names.get(name, {"model", "kind", "endpoint"})}
        assert grouped <= allowed | _TARGET_LABELS, f"{where}: grouped by {grouped - allowed}"


def test_values_of_labels_are_written_somewhere() -> None:
    source = "".join(path.read_text() for path in (ROOT / "service").rglob("*.py"))
    for where, expression in expressions():
        for label, values in re.findall(r'(\w+)\s*(?:=~|!=|!~|=)\s*"([^"$]+)"', expression):
            if label not in ("alert", "job"):
                assert not [value for value in values.split("|") if f'"{value}"' not in source], f"{where}: {label}"


def test_dashboards_are_what_the_script_writes() -> None:
    written = {path.name: path.read_text() for path in DASHBOARDS}
    assert written == {f"{d.uid.removeprefix('reprise-')}.json": build.text(d) for d in build.ALL}


def test_every_metric_is_shown_somewhere() -> None:
    text = " ".join(expression for _, expression in expressions())
    unseen = [spec.name for spec in SPECS if f"reprise_{spec.name}" not in text]
    assert not unseen


def test_latency_thresholds_lie_on_bucket_bounds() -> None:
    buckets = {f"reprise_{spec.name}": spec.buckets for spec in SPECS if spec.buckets}
    checked = 0
    for rule in rules():
        match = re.match(r"model:(reprise_\w+):p95_5m > ", rule.get("expr", ""))
        if match:
            assert thresholds()[rule["alert"]] in buckets[match[1]], rule["alert"]
            checked += 1
    assert checked >= 4


def test_alerts_read_their_own_threshold() -> None:
    read = {
        rule["alert"]: re.findall(r'scalar\(reprise:threshold\{alert="(\w+)"\}\)', rule["expr"])
        for rule in rules()
        if "alert" in rule and "reprise:threshold" in rule["expr"]
    }
    assert read == {alert: [alert] for alert in thresholds()}
    bare = [rule["alert"] for rule in rules() if "alert" in rule and re.search(r"[<>]=? 0?\.\d", rule["expr"])]
    assert not bare, f"{bare} compare with a number of their own"


def test_every_alert_names_its_paragraph() -> None:
    headings = re.findall(r"^### (\w+)$", ALERTS_PAGE.read_text(), re.M)
    named = {rule["alert"]: rule["annotations"]["runbook"] for rule in rules() if "alert" in rule}
    assert named == {alert: f"docs/alerts.md#{alert.lower()}" for alert in headings}
    assert len(headings) == len(set(headings))


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_variables_are_declared_and_used(path: Path) -> None:
    board = json.loads(path.read_text())
    declared = {variable["name"] for variable in board["templating"]["list"]}
    text = json.dumps([board["panels"], board["annotations"]])
    assert set(re.findall(r"\$\{?(?!__)(\w+)", text)) == declared
