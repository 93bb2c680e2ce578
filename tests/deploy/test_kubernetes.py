"""The manifests of deploy/kubernetes, put together as kustomize does: what they name is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from service.metrics.metrics import SPECS
from service.settings.settings import Settings
from tests.deploy.kustomize import FOLDER, Manifest, build, kustomizations, manifest_files
from tests.deploy.test_manifests import MARGIN, ROOT

BASE, FULL = FOLDER / "base", FOLDER / "overlays/full"
BUILT_IN = re.compile(r"v1|(apps|autoscaling|policy)/v\d+")
"""API groups that every cluster has."""
ADAPTER = FOLDER / "components/autoscaling/prometheus-adapter-values.yaml"
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


def test_every_file_and_component_belongs_to_the_full_overlay() -> None:
    overlay = yaml.safe_load((FULL / "kustomization.yaml").read_text())
    assert {(FULL / name).resolve() for name in overlay["components"]} == set(kustomizations("Component"))
    known = {*manifest_files(), ADAPTER} | {path / "kustomization.yaml" for path in FOLDER.rglob("*") if path.is_dir()}
    assert not set(FOLDER.rglob("*.yaml")) - known


def test_the_base_has_no_kind_that_a_plain_cluster_does_not_know(full: list[Manifest]) -> None:
    assert all(BUILT_IN.fullmatch(manifest["apiVersion"]) for manifest in build(BASE))
    foreign = {manifest["kind"] for manifest in full if not BUILT_IN.fullmatch(manifest["apiVersion"])}
    assert foreign == {"PodMonitor"}


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


def test_pods_are_put_on_gpus(pod: dict[str, Any]) -> None:
    (container,) = pod["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["spec"]["tolerations"]
    assert pod["spec"]["nodeSelector"] == {"nvidia.com/gpu.present": "true"}


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
