"""What the compose file and the Kubernetes manifests promise, read from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from service.settings import Settings

ROOT = Path(__file__).parents[2]
MARGIN = 10
"""Seconds beyond a drain until a service manager may kill."""


def compose() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "docker-compose.yml").read_text())


def started(profiles: set[str]) -> dict[str, Any]:
    """Services that `docker compose up` starts with those profiles."""
    services = compose()["services"].items()
    return {
        name: service for name, service in services if not service.get("profiles") or profiles & {*service["profiles"]}
    }


def test_a_plain_up_serves_on_the_cpu_and_the_profile_on_a_gpu_instead() -> None:
    lines = (ROOT / ".env").read_text().splitlines()
    variables = dict(line.split("=", 1) for line in lines if not line.startswith("#"))
    plain = set(variables["COMPOSE_PROFILES"].split(","))
    assert set(started(plain)) == {"cpu", "prometheus", "grafana"}
    assert set(started({"gpu"})) == {"gpu", "prometheus", "grafana"}
    for services in (started(plain), started({"gpu"})):
        ports = [port for service in services.values() for port in service["ports"]]
        assert all(port.startswith("127.0.0.1:") for port in ports) and len(set(ports)) == len(ports)


def test_services_are_pinned_checked_and_restarted() -> None:
    for name, service in compose()["services"].items():
        assert service["restart"] == "unless-stopped", name
        image, _, tag = service["image"].partition(":")
        assert tag and tag != "latest", image
        assert "healthcheck" in service or "build" in service, f"{name}: our own image has its check"


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_containers_have_time_to_drain_and_no_more_rights_than_they_need(name: str) -> None:
    service = compose()["services"][name]
    drain = Settings.model_fields["drain_timeout"].default
    assert int(service["stop_grace_period"].removesuffix("s")) >= drain + MARGIN
    assert service["read_only"] and service["cap_drop"] == ["ALL"] and service["init"]
    assert service["networks"]["default"]["aliases"] == ["server"]
    scrape = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"][0]
    assert scrape["job_name"] == "reprise" and scrape["static_configs"] == [{"targets": ["server:8000"]}]


def test_environment_names_settings() -> None:
    names = {name for service in compose()["services"].values() for name in service.get("environment", {})}
    manifests = yaml.safe_load_all((ROOT / "deploy/kubernetes/reprise.yaml").read_text())
    names |= {name for manifest in manifests if manifest["kind"] == "ConfigMap" for name in manifest["data"]}
    ours = {name.removeprefix("REPRISE_").lower() for name in names if name.startswith("REPRISE_")}
    assert ours and ours <= set(Settings.model_fields)


def test_pods_have_time_to_drain() -> None:
    manifests = {m["kind"]: m for m in yaml.safe_load_all((ROOT / "deploy/kubernetes/reprise.yaml").read_text())}
    settings = manifests["ConfigMap"]["data"]
    drain = float(settings["REPRISE_DRAIN_DELAY"]) + float(settings["REPRISE_DRAIN_TIMEOUT"])
    pod = manifests["Deployment"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] >= drain + MARGIN
    probe = pod["containers"][0]["readinessProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] < float(settings["REPRISE_DRAIN_DELAY"])
