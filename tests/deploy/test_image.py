"""The CPU image, really built and driven once, without a container engine.

buildah builds the Dockerfile with chroot isolation; a minimal Debian made by debootstrap stands in for the official
base image, since no image registry is asked. Wheels are downloaded beforehand and given to the build as a folder.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from packaging.requirements import Requirement

from deploy.install.lock import TORCH_LOCK, read
from tests.support.processes import ServerProcess
from tests.support.waiting import GENEROUS

ROOT = Path(__file__).parents[2]
SUITE = "bookworm"
BASE_PACKAGES = "python3,python3-venv,ca-certificates"
PIP_CONFIG = "[global]\nno-index = true\nfind-links = /wheels\n"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def run(*command: str | Path, **options: object) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload]
    assert done.returncode == 0, f"{command}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return str(done.stdout)


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """buildah over a storage of its own, removed at the end."""
    assert shutil.which("buildah"), "buildah is not installed"
    root = tmp_path_factory.mktemp("storage")
    os.environ |= {"STORAGE_DRIVER": "vfs", "BUILDAH_ISOLATION": "chroot"}
    command = ["buildah", "--root", str(root / "root"), "--runroot", str(root / "run")]
    yield command
    subprocess.run([*command, "rm", "--all"], check=False, capture_output=True)
    subprocess.run([*command, "rmi", "--all", "--force"], check=False, capture_output=True)
    shutil.rmtree(root, ignore_errors=True)


@pytest.fixture(scope="module")
def base(buildah: list[str], tmp_path_factory: pytest.TempPathFactory) -> str:
    """An image with Python and nothing else, whose pip knows the folder of wheels alone."""
    assert shutil.which("debootstrap"), "debootstrap is not installed"
    rootfs = tmp_path_factory.mktemp("rootfs")
    run("debootstrap", "--variant=minbase", f"--include={BASE_PACKAGES}", SUITE, rootfs)
    (rootfs / "etc/pip.conf").write_text(PIP_CONFIG)
    shutil.rmtree(rootfs / "var/cache/apt", ignore_errors=True)
    container = run(*buildah, "from", "scratch").strip()
    run(*buildah, "copy", container, rootfs, "/")
    run(*buildah, "commit", container, "localhost/base")
    shutil.rmtree(rootfs, ignore_errors=True)
    return "localhost/base"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the locks name for the base's Python, which has the version of this one."""
    assert sys.version_info[:2] == (3, 11), f"Debian {SUITE} has Python 3.11, the tests run on {sys.version}"
    folder = tmp_path_factory.mktemp("wheels")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "-d", folder]
    for lock in ("requirements.lock", "requirements-build.lock"):
        run(*pip, "--no-deps", "--require-hashes", "-r", ROOT / lock)
    run(*pip, "-c", ROOT / "requirements-torch.lock", "torch")
    return folder


@pytest.fixture(scope="module")
def image(buildah: list[str], base: str, wheels: Path) -> str:
    run(
        *buildah, "bud", "--format", "docker", "--build-arg", f"BASE={base}", "--volume", f"{wheels}:/wheels:ro",
        "--tag", "localhost/reprise", ".", cwd=ROOT,
    )  # fmt: skip
    return "localhost/reprise"


def test_the_image_says_how_it_runs(buildah: list[str], image: str) -> None:
    config = json.loads(run(*buildah, "inspect", "--type", "image", image))["Docker"]["config"]
    assert config["User"] == "10001:10001"
    assert config["Entrypoint"] == ["reprise"] and config["Cmd"] == ["serve"]
    assert "/ready" in config["Healthcheck"]["Test"][-1]
    assert not [name for name in config["Env"] if "KEY" in name or "TOKEN" in name]


@pytest.fixture(scope="module")
def container(buildah: list[str], image: str) -> str:
    """One for all tests: its file system is a copy of the image's."""
    return run(*buildah, "from", "--name", f"reprise-{uuid.uuid4().hex[:8]}", image).strip()


def test_the_image_holds_what_is_locked(buildah: list[str], container: str) -> None:
    python = "/opt/reprise/bin/python"
    listed = run(*buildah, "run", container, "--", python, "-m", "pip", "list", "--format", "json")
    installed = {package["name"].lower().replace("_", "-"): package["version"] for package in json.loads(listed)}
    for entry in [*read("requirements.lock"), *read(TORCH_LOCK)]:
        asked = Requirement(entry.pin)
        if asked.name in installed:
            assert asked.specifier.contains(installed[asked.name]), f"{asked}, found {installed[asked.name]}"
    assert installed.keys() >= {"torch", "fastapi", "reprise-server"} and not {"hatchling", "pytest"} & installed.keys()


def test_the_image_serves_as_an_ordinary_user(buildah: list[str], container: str) -> None:
    environment = ["--env=REPRISE_PORT=0", "--env=REPRISE_LOG_FORMAT=json", "--env=PATH=/opt/reprise/bin:/usr/bin:/bin"]
    command = [*buildah, "run", *environment, "--user=10001:10001", container, "--", "reprise", "serve"]
    server = ServerProcess(subprocess.Popen(command, stderr=subprocess.PIPE, text=True))
    try:
        server.wait_ready()
        model = httpx.get(f"{server.url}/v1/models", timeout=GENEROUS).json()["data"][0]["id"]
        body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=600)
        assert answer.json()["usage"]["completion_tokens"] >= 1
    finally:
        server.stop(seconds=600)
