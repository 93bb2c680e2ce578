"""As much of kustomize as deploy/kubernetes uses: resources and components, put together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[2] / "deploy/kubernetes"
FILE = "kustomization.yaml"
VERSIONS = {"Kustomization": "kustomize.config.k8s.io/v1beta1", "Component": "kustomize.config.k8s.io/v1alpha1"}
FIELDS = {"apiVersion", "kind", "resources", "components"}

Manifest = dict[str, Any]


def build(folder: Path, kind: str = "Kustomization") -> list[Manifest]:
    """The manifests of a folder. AssertionError for what kustomize refuses: a field that is unknown (here), a reference
    to nothing, to a component among resources or the other way round, and two manifests of one kind and name."""
    kustomization = yaml.safe_load((folder / FILE).read_text())
    assert kustomization["kind"] == kind and kustomization["apiVersion"] == VERSIONS[kind], folder
    assert kustomization.keys() <= FIELDS, f"{folder}: {kustomization.keys() - FIELDS} is not understood here"
    manifests = [
        manifest
        for reference in kustomization.get("resources", ())
        for manifest in _resource((folder / reference).resolve())
    ]
    for reference in kustomization.get("components", ()):
        manifests += build((folder / reference).resolve(), "Component")
    names = [(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests]
    assert len(set(names)) == len(names), f"{folder}: {names}"
    return manifests


def _resource(path: Path) -> list[Manifest]:
    return build(path) if path.is_dir() else list(yaml.safe_load_all(path.read_text()))


def kustomizations(kind: str) -> list[Path]:
    """Folders of that kind."""
    found = [path for path in sorted(FOLDER.rglob(FILE)) if yaml.safe_load(path.read_text())["kind"] == kind]
    return [path.parent for path in found]


def manifest_files() -> Iterator[Path]:
    """Files that kustomizations name."""
    for path in sorted(FOLDER.rglob(FILE)):
        for reference in yaml.safe_load(path.read_text()).get("resources", ()):
            if (path.parent / reference).is_file():
                yield path.parent / reference
