"""Deployment files through the tools of their trade. A missing tool is a failure."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from service.metrics import SPECS

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def tool(name: str) -> str:
    """Path of a program, of this environment first."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    assert found, f"{name} is not installed; `make test-all` says how"
    return found


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
    return done.stdout


def test_rules_pass_promtool() -> None:
    folder = ROOT / "deploy/prometheus"
    run(tool("promtool"), "check", "config", "--syntax-only", "prometheus.yml", cwd=folder)
    run(tool("promtool"), "check", "rules", *sorted(folder.glob("rules/*.yml")))
    run(tool("promtool"), "test", "rules", folder / "tests/alerts_test.yml")


def test_every_alert_has_a_unit_test() -> None:
    alerts = (ROOT / "deploy/prometheus/rules/alerts.yml").read_text()
    tests = (ROOT / "deploy/prometheus/tests/alerts_test.yml").read_text()
    names = [line.split(":")[1].strip() for line in alerts.splitlines() if line.strip().startswith("- alert:")]
    assert names and not [name for name in names if f"alertname: {name}\n" not in tests]


def test_dockerfile_passes_hadolint() -> None:
    run(tool("hadolint"), "Dockerfile")


def test_compose_file_fits_the_compose_specification() -> None:
    run(tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", "docker-compose.yml")


def test_kubernetes_manifests_fit_their_schemas() -> None:
    for path in sorted((ROOT / "deploy/kubernetes").glob("*.yaml")):
        run(tool("kubernetes-validate"), "--strict", "--quiet", path)


def test_monitoring_names_what_the_deployment_has() -> None:
    """A PodMonitor is no part of Kubernetes itself: its schema is not at hand."""
    manifests = [
        manifest
        for path in sorted((ROOT / "deploy/kubernetes").glob("*.yaml"))
        for manifest in yaml.safe_load_all(path.read_text())
    ]
    kinds = {manifest["kind"]: manifest for manifest in manifests}
    monitor, scaler, deployment = (kinds[kind] for kind in ("PodMonitor", "HorizontalPodAutoscaler", "Deployment"))
    pod = deployment["spec"]["template"]
    ports = {port["name"] for container in pod["spec"]["containers"] for port in container["ports"]}
    assert monitor["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]} <= ports
    assert pod["metadata"]["labels"][monitor["spec"]["jobLabel"]] == "reprise", "alerts are about that job"
    assert "replicas" not in deployment["spec"], "the autoscaler decides"
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    gauges = {f"reprise_{spec.name}" for spec in SPECS if spec.kind == "gauge"}
    assert {metric["pods"]["metric"]["name"] for metric in scaler["spec"]["metrics"]} <= gauges
