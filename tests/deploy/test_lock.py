"""The locks: what pyproject.toml asks for is there, with hashes, and is what `make` and the image install."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy.install.lock import BUILD_LOCK, LOCKS, TORCH_LOCK, UNHASHED, Entry, read

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HASHED = [*LOCKS, BUILD_LOCK]


def parsed(entry: Entry) -> Requirement:
    return Requirement(entry.pin)


def versions(name: str) -> dict[str, str]:
    return {canonicalize_name(entry.name): parsed(entry).specifier.__str__().removeprefix("==") for entry in read(name)}


def wanted(extras: tuple[str, ...]) -> list[Requirement]:
    """What pyproject.toml asks for, extras that name extras resolved."""
    lines = [*PROJECT["dependencies"]]
    for extra in extras:
        for line in PROJECT["optional-dependencies"][extra]:
            asked = Requirement(line)
            lines += map(str, wanted(tuple(asked.extras))) if asked.name == PROJECT["name"] else [line]
    return [Requirement(line) for line in lines]


@pytest.mark.parametrize("name", HASHED)
def test_each_package_has_a_version_and_hashes(name: str) -> None:
    found = read(name)
    assert found
    for entry in found:
        assert re.fullmatch(r"==[^*,]+", str(parsed(entry).specifier)), entry.pin
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry.text), entry.name
        assert not UNHASHED.fullmatch(entry.name), entry.name
    assert "://" not in (ROOT / name).read_text(), "no index is named"


def test_torch_and_its_libraries_are_held_by_version_alone() -> None:
    found = read(TORCH_LOCK)
    assert {"torch", "triton"} < {entry.name for entry in found}
    for entry in found:
        assert UNHASHED.fullmatch(entry.name) and entry.text == f"{entry.pin}\n" and "==" in entry.pin


@pytest.mark.parametrize(("name", "extras"), LOCKS.items())
def test_what_the_project_asks_for_is_locked(name: str, extras: tuple[str, ...]) -> None:
    locked = versions(name) | versions(TORCH_LOCK)
    for asked in wanted(extras):
        assert asked.specifier.contains(locked[canonicalize_name(asked.name)]), f"{asked}: run `make lock`"


def test_the_locks_agree() -> None:
    largest, *others = LOCKS
    most = versions(largest)
    for name in (*others, BUILD_LOCK):
        shared = versions(name).items()
        assert dict(shared) == {package: most.get(package, held) for package, held in shared}
    for name in others:
        assert versions(name).keys() <= most.keys()


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_is_complete(name: str) -> None:
    """pip is told to install no dependencies of what is listed: they must be listed, too. torch's are, so that what is
    not hashed brings nothing else."""
    locked = versions(name).keys() | versions(TORCH_LOCK).keys()
    for package in locked:
        try:
            required = [Requirement(line) for line in requires(package) or []]
        except PackageNotFoundError:  # of another platform, or of a larger lock than the one that is installed
            continue
        for need in required:
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                assert canonicalize_name(need.name) in locked, f"{package} needs {need}"


@pytest.mark.skipif(not os.environ.get("CI"), reason="an environment of one's own may differ")
def test_ci_runs_what_is_locked() -> None:
    for entry in read("requirements-test.lock"):
        asked = parsed(entry)
        if asked.marker is None or asked.marker.evaluate():
            assert asked.specifier.contains(version(asked.name)), f"{asked}, found {version(asked.name)}"


def commands(*arguments: str) -> str:
    """What `make` would do in an empty environment."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    command = ["make", "-n", "VENV=/nowhere/venv", *arguments]
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=True).stdout


def test_make_installs_hashed_packages_before_torch_and_the_project_last() -> None:
    said = commands("test")
    steps = [
        "--no-deps --require-hashes -r requirements.lock",
        f"--no-deps --require-hashes -r {BUILD_LOCK}",
        "--torch-backend cpu",
        "torch_notice.py",
        f"-c {TORCH_LOCK} torch",
        "--no-deps --no-build-isolation -e .",
        "--no-deps --require-hashes -r requirements-test.lock",
    ]
    places = [said.index(step) for step in steps]
    assert places == sorted(places) and "--extra-index-url" not in said


@pytest.mark.parametrize(("gpu", "reachable"), [(False, True), (False, False), (True, True)])
def test_without_a_gpu_torch_is_the_build_for_the_cpu(tmp_path: Path, gpu: bool, reachable: bool) -> None:
    """Where its index cannot be reached, the download of the other one is announced."""
    for tool in ("python", "uv", "nvidia-smi")[: 3 if gpu else 2]:
        (tmp_path / tool).write_text(f'#!/bin/sh\necho {tool} "$@"\nexit {int(tool == "uv" and not reachable)}\n')
        (tmp_path / tool).chmod(0o755)
    rule = next(line for line in commands("serve").splitlines() if "--torch-backend" in line)
    rule = rule.replace("/nowhere/venv/bin", str(tmp_path)).replace("/dev/nvidiactl", str(tmp_path / "none"))
    path = f"{tmp_path}:/usr/bin:/bin"
    done = subprocess.run(["sh", "-ec", rule], cwd=ROOT, env={"PATH": path}, capture_output=True, text=True, check=True)
    ran = [line.partition(" ")[0] for line in done.stdout.splitlines()]
    assert ran == (["python", "python"] if gpu else ["uv"] if reachable else ["uv", "python", "python"])
    assert "-q" not in done.stdout
