"""A second golden directory can be dropped in: REPRISE_GOLDEN names it, and its own files say what is expected."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.support.golden import OWN
from tests.support.golden_variant import PREFIX, make_variant

ROOT = Path(__file__).parent.parent
FILES = (
    *("models/families/test_golden.py", "models/voxcpm2/test_golden.py", "models/families/test_replay.py"),
    *("models/families/test_engine.py", "models/families/test_http.py"),
)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run(directory: Path, *arguments: str) -> tuple[int, str]:
    """Golden tests on `directory`: pytest's exit status and output."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "REPRISE_GOLDEN": str(directory)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_another_directory_is_enough(tmp_path: Path) -> None:
    make_variant(OWN, tmp_path)
    status, output = run(tmp_path, *(f"tests/{file}" for file in FILES), "-vv")
    assert status == 0, output
    assert PREFIX in output and " passed" in output


def test_another_value_is_noticed(tmp_path: Path) -> None:
    """So the tests read this directory and no other."""
    make_variant(OWN, tmp_path)
    file = tmp_path / "qwen2_vl/expected.safetensors"
    tensors = load_file(file)
    save_file({name: each.flip(0) if name.endswith(".generated_ids") else each for name, each in tensors.items()}, file)
    status, output = run(tmp_path, "tests/models/families/test_golden.py", "-k", "greedy and qwen2_vl")
    assert status == 1 and "AssertionError" in output
