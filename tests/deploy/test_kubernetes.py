"""The manifests of deploy/kubernetes, put together as kustomize does: what they name is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from service.metrics.metrics import SPECS
from service.settings.settings import Settings
from tests.deploy.kustomize import FOLDER, Manifest, build, kustomizations
from tests.deploy.test_manifests import MARGIN, ROOT

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
