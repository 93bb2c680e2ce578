"""The wheel as pipx or pip install it: into an environment of its own, used from a directory full of namesakes."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.support.optional import needed
from tests.support.processes import ServerProcess
from tests.support.waiting import GENEROUS

ROOT = Path(__file__).parents[2]
MOST_BYTES = 36_000_000
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run(*command: str | Path, cwd: Path) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built by the locked build packages of this environment."""
    needed("hatchling")
    folder = tmp_path_factory.mktemp("dist")
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    run(*pip, ".", cwd=ROOT)
    (built,) = folder.glob("reprise_server-*.whl")
    return built


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Programs of a fresh environment with the wheel in it; what it depends on comes from this one."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    run(folder / "bin/python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=folder)
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


@pytest.fixture
def namesakes(tmp_path: Path) -> Path:
    """A directory with modules called like ours, and like one of those that we use."""
    for name in ("models.py", "torch.py", "service/__init__.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"raise SystemExit('{name} of the current directory was imported')\n")
    return tmp_path


@pytest.fixture
def server(environment: Path, namesakes: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ServerProcess]:
    command = [environment / "reprise", "serve", "--port", "0", "--log-format", "json"]
    variables = {**os.environ, "HOME": str(namesakes), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=namesakes, env=variables)
    running = ServerProcess(process)
    try:
        running.wait_ready()
        yield running
    finally:
        running.stop()


def test_the_wheel_holds_one_package_and_nothing_that_it_does_not_need(wheel: Path) -> None:
    assert wheel.stat().st_size < MOST_BYTES
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].removesuffix(".dist-info") for name in names} == {"reprise_server", wheel.stem[:20]}
    needless = ("/make_", "/tests/", "/recogniser/", ".pyc")
    assert not [name for name in names if any(part in name for part in needless)]
    for wanted in ("ray_serve/app.py", "models/embedded/qwen2_vl/model.safetensors", "service/launch.py"):
        assert f"reprise_server/{wanted}" in names
    page = {file.name for file in (ROOT / "service/page").iterdir() if file.is_file()}
    assert {f"reprise_server/service/page/{file}" for file in page} <= {*names}


def test_it_leaves_the_names_of_its_packages_to_others(environment: Path, tmp_path: Path) -> None:
    program = """
from importlib.util import find_spec
assert find_spec("models") is None and find_spec("service") is None
import reprise_server
import models, service.settings.settings
assert models.__file__.startswith(str(reprise_server.ROOT)) and "reprise_server" in service.settings.settings.__file__
"""
    run(environment / "python", "-P", "-c", program, cwd=tmp_path)


def test_the_server_answers(server: ServerProcess) -> None:
    """Its processes run the wheel's code, whatever lies in the current directory."""
    names = {card["kind"]: card["id"] for card in httpx.get(f"{server.url}/v1/models").json()["data"]}
    body = {"model": names["chat"], "max_tokens": 2, "messages": [{"role": "user", "content": "Hello"}]}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=GENEROUS)
    assert answer.json()["usage"]["completion_tokens"] >= 1
    page = httpx.get(f"{server.url}/").text
    (script,) = re.findall(r'src="(page/main\.js)"', page)
    assert httpx.get(f"{server.url}/{script}").headers["content-type"].startswith("text/javascript")
    spoken = {"model": names["speech"], "input": "Hello.", "response_format": "wav"}
    assert httpx.post(f"{server.url}/v1/audio/speech", json=spoken, timeout=GENEROUS).status_code == 200
    assert server.stop() == 0
    assert not any(str(ROOT) in str(line) for line in server.log)
