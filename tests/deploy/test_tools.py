"""Deployment files through the tools of their trade. A missing tool is a failure."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.deploy.kustomize import manifest_files
from tests.deploy.promql import annotations, queries

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def tool(name: str) -> str:
    """Path of a program, of this environment first."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    assert found, f"{name} is not installed; `make test-all` says how"
    return found


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
    return done.stdout


def test_rules_pass_promtool() -> None:
    folder = ROOT / "deploy/prometheus"
    run(tool("promtool"), "check", "config", "--syntax-only", "prometheus.yml", cwd=folder)
    run(tool("promtool"), "check", "rules", *sorted(folder.glob("rules/*.yml")))
    run(tool("promtool"), "test", "rules", folder / "tests/alerts_test.yml")


def test_expressions_of_dashboards_pass_promtool(tmp_path: Path) -> None:
    panels = [expression.replace("$__rate_interval", "1m") for _, expression in (*queries(), *annotations())]
    rules = [{"record": f"panel:{number}", "expr": expression} for number, expression in enumerate(panels)]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    run(tool("promtool"), "check", "rules", tmp_path / "rules.yml")


def test_every_alert_has_a_unit_test() -> None:
    alerts = (ROOT / "deploy/prometheus/rules/alerts.yml").read_text()
    tests = (ROOT / "deploy/prometheus/tests/alerts_test.yml").read_text()
    names = [line.split(":")[1].strip() for line in alerts.splitlines() if line.strip().startswith("- alert:")]
    assert names and not [name for name in names if f"alertname: {name}\n" not in tests]


def test_dockerfile_passes_hadolint() -> None:
    run(tool("hadolint"), "Dockerfile")


def test_compose_file_fits_the_compose_specification() -> None:
    files = ROOT / "docker-compose.yml", ROOT / "deploy/docker-compose.gpu.yml"
    run(tool("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", *files)


@pytest.mark.parametrize("on_a_gpu", [False, True])
def test_podman_compose_starts_one_server_on_one_port(on_a_gpu: bool, tmp_path: Path) -> None:
    """It merges files by rules of its own. Of podman it asks for its version alone."""
    podman = tmp_path / "podman"
    podman.write_text("#!/bin/sh\necho podman version 5.4.0\n")
    podman.chmod(0o755)
    files = ["docker-compose.yml", *(["deploy/docker-compose.gpu.yml"] if on_a_gpu else [])]
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "REPRISE_API_KEY": "of the environment"}
    command = [tool("podman-compose"), *(part for name in files for part in ("-f", name)), "config"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    services = yaml.safe_load(done.stdout)["services"]
    published = [port for service in services.values() for port in service["ports"]]
    assert len(set(published)) == len(published) == 4
    server = services["server"]
    assert server["image"] == ("reprise:0.1.0-cuda" if on_a_gpu else "reprise:0.1.0")
    assert server["volumes"] == ["models:/var/lib/reprise" if on_a_gpu else "state:/var/lib/reprise"]
    assert server["ports"] == ["127.0.0.1:8000:8000"]
    assert server["environment"]["REPRISE_API_KEY"] == "of the environment"


def test_kubernetes_manifests_fit_their_schemas() -> None:
    """A PodMonitor is no part of Kubernetes itself, nor is a kustomization: their schemas are not at hand."""
    for path in manifest_files():
        if "PodMonitor" not in path.read_text():
            run(tool("kubernetes-validate"), "--strict", "--quiet", path)
