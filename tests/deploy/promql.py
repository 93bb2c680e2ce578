"""The expressions of dashboards and rules, and the names and labels in them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARDS = sorted((DEPLOY / "grafana/dashboards").glob("*.json"))
RULES = sorted((DEPLOY / "prometheus/rules").glob("*.yml"))
THRESHOLD = "reprise:threshold"
_NAME = re.compile(r"\b(?:[a-z]+:)?(?:reprise|process|python)_[a-z0-9_]+(?::[a-z0-9_]+)?|\bup\b")
_SELECTOR = re.compile(r"\b((?:reprise|process|python)_\w+)\{([^}]*)\}")
_LABEL = re.compile(r"(\w+)\s*(?:=~|!=|!~|=)")


def rules() -> list[dict[str, Any]]:
    documents = [yaml.safe_load(path.read_text()) for path in RULES]
    return [rule for document in documents for group in document["groups"] for rule in group["rules"]]


def thresholds() -> dict[str, float]:
    """What alerts compare with, by alert."""
    found = {}
    for rule in rules():
        if rule.get("record") == THRESHOLD:
            (value,) = re.fullmatch(r"vector\(([\d.]+)\)", rule["expr"]).groups()  # type: ignore[union-attr]
            found[rule["labels"]["alert"]] = float(value)
    return found


def captured() -> set[str]:
    return {rule["record"] for rule in rules() if "record" in rule}


def queries() -> list[tuple[str, str]]:
    """(dashboard and panel, expression) of every panel."""
    return [
        (f"{path.stem}: {panel['title']}", target["expr"])
        for path in DASHBOARDS
        for panel in json.loads(path.read_text())["panels"]
        for target in panel.get("targets", ())
    ]


def annotations() -> list[tuple[str, str]]:
    """(dashboard and annotation, expression) of every annotation."""
    return [
        (f"{path.stem}: {annotation['name']}", annotation["expr"])
        for path in DASHBOARDS
        for annotation in json.loads(path.read_text())["annotations"]["list"]
    ]


def expressions() -> list[tuple[str, str]]:
    """(where it stands, expression) of every rule, panel and annotation; thresholds are numbers."""
    measured = [rule for rule in rules() if rule.get("record") != THRESHOLD]
    return [(rule.get("record") or rule["alert"], rule["expr"]) for rule in measured] + queries() + annotations()


def _without_values(expression: str) -> str:
    return re.sub(r'"[^"]*"', '""', expression)


def metrics_in(expression: str) -> list[str]:
    return _NAME.findall(_without_values(expression))


def selectors_in(expression: str) -> list[tuple[str, set[str]]]:
    """(metric, labels that it is selected by)"""
    found = _SELECTOR.findall(_without_values(expression))
    return [(name, set(_LABEL.findall(selector))) for name, selector in found]


def grouping_in(expression: str) -> set[str]:
    return {label for group in re.findall(r"by \(([^)]*)\)", expression) for label in re.split(r",\s*", group)}
