"""docs/operation.md speaks of settings, metrics and alerts that exist."""

from __future__ import annotations

import re

import yaml

from service.metrics import PREFIX, SPECS
from service.settings import Settings
from tests.support.processes import ROOT

TEXT = (ROOT / "docs/operation.md").read_text()


def test_settings_exist() -> None:
    tables = [line.split("|")[2] for line in TEXT.splitlines() if line.startswith("|") and "`reprise_" not in line]
    named = {name for cell in tables for name in re.findall(r"`([a-z]+(?:_[a-z]+)+)`", cell)}
    assert len(named) > 20
    assert named <= set(Settings.model_fields)


def test_metrics_exist() -> None:
    known = {f"{PREFIX}_{spec.name}" for spec in SPECS}
    assert set(re.findall(rf"`({PREFIX}_\w+)", TEXT)) <= known


def test_every_alert_is_explained() -> None:
    rules = yaml.safe_load((ROOT / "deploy/prometheus/rules/alerts.yml").read_text())
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    assert set(re.findall(r"\bReprise[A-Z]\w+", TEXT)) == alerts
