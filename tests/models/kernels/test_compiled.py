"""What `make compile-kernels` recorded, and kernels that changed since, compiled anew without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import triton

from benchmarks.kernels.compile import MOST_REGISTERS, OUT, Made, summary
from benchmarks.kernels.offline import ARCHITECTURES
from models.layers.kernels.gpu import named
from tests.support.processes import ROOT

RECORDED = json.loads((ROOT / OUT).read_text())
SECONDS = 1500
"""A busy machine takes many times the 6 minutes of an idle one with 2 cores."""


@pytest.mark.parametrize("version", RECORDED)
def test_everything_that_was_compiled_fits(version: str) -> None:
    limits = {named(gpu.capability): gpu.shared_memory for gpu in ARCHITECTURES}
    for name, found in RECORDED[version].items():
        assert found["shared_limit"] == limits[name]
        for kernel, made in found["by_kernel"].items():
            assert made["shared"] <= limits[name], f"{kernel} on {name}"
            assert made["registers"] <= MOST_REGISTERS, f"{kernel} on {name}"


def test_what_does_not_fit_is_a_fault() -> None:
    ada = next(gpu for gpu in ARCHITECTURES if gpu.capability == (8, 9))
    assert not list(Made("fits", 99 << 10, 255, 8, 128).faults(ada))
    assert len(list(Made("too much memory", (99 << 10) + 1, 32, 0, 128).faults(ada))) == 1
    assert len(list(Made("too many registers", 0, 160, 0, 512).faults(ada))) == 1
    assert summary("hash", [Made("a", 10, 20, 0, 128), Made("b", 30, 10, 8, 128)]) == {
        "hash": "hash", "configurations": 2, "shared": 30, "registers": 20, "spilling": 1, "stack": 8
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(SECONDS)
def test_kernels_that_changed_compile(tmp_path: Path) -> None:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(tmp_path)}
    environment.pop("TRITON_INTERPRET", None)
    found = tmp_path / "compiled.json"
    found.write_text((ROOT / OUT).read_text())
    # Of another Triton all have changed: one configuration of each then.
    which = ["--update", "--out", found] if triton.__version__ in RECORDED else ["--changed"]
    # The others take most of an hour: `make compile-kernels`.
    command = [sys.executable, "-m", "benchmarks.kernels.compile", "--gpu", "sm_80", "sm_90", *which]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stderr
