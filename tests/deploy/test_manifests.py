"""What the compose files and the manifests of deploy/kubernetes promise, put together as their tools do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.metrics.metrics import SPECS
from service.settings.settings import Settings, load_settings
from tests.deploy.kustomize import FOLDER, Manifest, build, kustomizations

ROOT = Path(__file__).parents[2]
MARGIN = 10
"""Seconds beyond a drain until a service manager may kill."""


def compose(name: str = "docker-compose.yml") -> dict[str, Any]:
    return yaml.safe_load((ROOT / name).read_text())


def test_ports_are_published_on_loopback() -> None:
    ports = [port for service in compose()["services"].values() for port in service["ports"]]
    assert len({port.rpartition(":")[2] for port in ports}) == len(ports) and all("_PORT:-" in port for port in ports)
    assert all(port.startswith(("127.0.0.1:", "${REPRISE_PUBLISH:-127.0.0.1}:")) for port in ports)


def test_keys_are_variables_and_no_file_with_them_is_tracked() -> None:
    environment = compose()["services"]["server"]["environment"]
    assert environment["REPRISE_API_KEY"] == "${REPRISE_API_KEY:-}"
    named = set(re.findall(r"\$\{(\w+)", (ROOT / "docker-compose.yml").read_text()))
    named |= set(re.findall(r"\$\{(\w+)", (ROOT / "deploy/docker-compose.gpu.yml").read_text()))
    example = (ROOT / ".env.example").read_text().splitlines()
    assert named | {"COMPOSE_FILE", "REPRISE_LOG_LEVEL"} == {
        line.strip("# ").partition("=")[0] for line in example if "=" in line
    }
    assert "/.env" in (ROOT / ".gitignore").read_text().splitlines() and all(line[:1] in ("", "#") for line in example)


def test_every_setting_in_the_file_reaches_the_server_but_the_port_inside() -> None:
    service = compose()["services"]["server"]
    assert service["env_file"] == [{"path": ".env", "required": False}]
    assert (
        service["environment"]["REPRISE_PORT"] == "8000" and "${REPRISE_PUBLISH_PORT:-8000}:8000" in service["ports"][0]
    )
    fixed = {name for name, value in service["environment"].items() if "${" not in str(value)}
    assert fixed == {"REPRISE_HOST", "REPRISE_PORT"}


def test_containers_have_time_to_drain_and_no_more_rights_than_they_need() -> None:
    service = compose()["services"]["server"]
    drain = Settings.model_fields["drain_timeout"].default
    assert int(service["stop_grace_period"].removesuffix("s")) >= drain + MARGIN
    assert service["read_only"] and service["cap_drop"] == ["ALL"] and service["init"]
    scrape = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())["scrape_configs"][0]
    assert scrape["job_name"] == "reprise" and scrape["static_configs"] == [{"targets": ["server:8000"]}]


def test_environment_names_settings() -> None:
    files = (compose(), compose("deploy/docker-compose.gpu.yml"))
    names = {name for file in files for service in file["services"].values() for name in service.get("environment", {})}
    ours = {name.removeprefix("REPRISE_").lower() for name in names if name.startswith("REPRISE_")}
    assert ours and ours <= set(Settings.model_fields)


def test_the_ray_application_serves_two_models() -> None:
    (application,) = yaml.safe_load((ROOT / "deploy/ray/reprise.yaml").read_text())["applications"]
    settings = load_settings(application["args"]["settings"])
    assert settings.model == ("Qwen/Qwen2-VL-2B-Instruct", "openbmb/VoxCPM2")


BASE, FULL = FOLDER / "base", FOLDER / "overlays/full"
PAGE = ROOT / "docs/kubernetes.md"


def of_kind(manifests: list[Manifest], kind: str) -> Manifest:
    (found,) = (manifest for manifest in manifests if manifest["kind"] == kind)
    return found


@pytest.fixture(scope="module")
def full() -> list[Manifest]:
    return build(FULL)


@pytest.fixture(scope="module")
def pod(full: list[Manifest]) -> dict[str, Any]:
    return of_kind(full, "Deployment")["spec"]["template"]


@pytest.mark.parametrize("folder", kustomizations("Kustomization"), ids=lambda folder: folder.name)
def test_each_kustomization_resolves(folder: Path) -> None:
    assert build(folder)


def test_what_a_pod_names_is_there(full: list[Manifest], pod: dict[str, Any]) -> None:
    """Secrets are made by hand, as the page says."""
    page, container = PAGE.read_text(), pod["spec"]["containers"][0]
    (source,) = container["envFrom"]
    assert source["configMapRef"]["name"] == of_kind(full, "ConfigMap")["metadata"]["name"]
    volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes.keys()
    claim = volumes["state"]["persistentVolumeClaim"]["claimName"]
    assert claim == of_kind(full, "PersistentVolumeClaim")["metadata"]["name"]
    assert f"kubectl create secret generic {volumes['keys']['secret']['secretName']} --from-literal=keys=" in page
    (token,) = container["env"]
    reference = token["valueFrom"]["secretKeyRef"]
    assert token["name"] == "HF_TOKEN" and reference["optional"]
    assert f"kubectl create secret generic {reference['name']} --from-literal={reference['key']}=" in page
    assert not [manifest for manifest in full if manifest["kind"] == "Secret"], "no key lies in a file"


def test_what_names_pods_finds_them(full: list[Manifest], pod: dict[str, Any]) -> None:
    labels = pod["metadata"]["labels"]
    ports = {port["name"] for container in pod["spec"]["containers"] for port in container["ports"]}
    service, monitor = of_kind(full, "Service")["spec"], of_kind(full, "PodMonitor")["spec"]
    selectors = [service["selector"], monitor["selector"]["matchLabels"]]
    selectors += [
        of_kind(full, kind)["spec"]["selector"]["matchLabels"] for kind in ("Deployment", "PodDisruptionBudget")
    ]
    assert all(selector.items() <= labels.items() for selector in selectors)
    assert {port["targetPort"] for port in service["ports"]} <= ports
    assert {endpoint["port"] for endpoint in monitor["podMetricsEndpoints"]} <= ports
    assert labels[monitor["jobLabel"]] == "reprise", "alerts are about that job"


def test_settings_come_from_the_config_map_alone(full: list[Manifest], pod: dict[str, Any]) -> None:
    """A Service named reprise would otherwise set REPRISE_PORT to an address."""
    names = of_kind(full, "ConfigMap")["data"]
    assert {name.removeprefix("REPRISE_").lower() for name in names} <= set(Settings.model_fields)
    assert pod["spec"]["enableServiceLinks"] is False
    mount = next(mount for mount in pod["spec"]["containers"][0]["volumeMounts"] if mount["name"] == "keys")
    assert names["REPRISE_API_KEY_FILE"] == f"{mount['mountPath']}/keys"


def test_pods_have_time_to_drain(full: list[Manifest], pod: dict[str, Any]) -> None:
    settings = of_kind(full, "ConfigMap")["data"]
    drain = float(settings["REPRISE_DRAIN_DELAY"]) + float(settings["REPRISE_DRAIN_TIMEOUT"])
    assert pod["spec"]["terminationGracePeriodSeconds"] >= drain + MARGIN
    probe = pod["spec"]["containers"][0]["readinessProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] < float(settings["REPRISE_DRAIN_DELAY"])


def asked(full: list[Manifest]) -> set[str]:
    """Metrics that the autoscaler asks for."""
    return {metric["pods"]["metric"]["name"] for metric in of_kind(full, "HorizontalPodAutoscaler")["spec"]["metrics"]}


def test_the_autoscaler_scales_the_deployment_on_gauges(full: list[Manifest]) -> None:
    target, deployment = (of_kind(full, kind) for kind in ("HorizontalPodAutoscaler", "Deployment"))
    assert target["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    assert "replicas" not in deployment["spec"], "the autoscaler decides"
    assert asked(full) <= {f"reprise_{spec.name}" for spec in SPECS if spec.kind == "gauge"}
