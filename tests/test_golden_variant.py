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
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "kimi_vl", "minicpmv", "voxcpm2")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def variant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("golden")
    make_variant(OWN, target)
    return target


def run(directory: Path, *arguments: str) -> tuple[int, str]:
    """Golden tests on `directory`: pytest's exit status and output."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "REPRISE_GOLDEN": str(directory)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("family", FAMILIES)
def test_networks(variant: Path, family: str) -> None:
    file = "voxcpm2" if family == "voxcpm2" else "families"
    status, output = run(variant, f"tests/models/{file}/test_golden.py", "-vv", "-k", family, "-m", "not gpu")
    assert status == 0, output
    assert PREFIX in output and " passed" in output


def test_the_engine_and_the_api(variant: Path) -> None:
    of_chat = ("engine/chat/test_chat_golden.py", "models/families/test_engine.py", "models/families/test_http.py")
    of_sizes = ("models/families/test_replay.py",)
    of_speech = ("models/voxcpm2/test_streams.py", "engine/speech/test_voices.py")
    files = (f"tests/{file}" for file in (*of_chat, *of_sizes, *of_speech))
    status, output = run(variant, *files, "-m", "not gpu")
    assert status == 0, output


def test_another_value_is_noticed(variant: Path, tmp_path: Path) -> None:
    """So the tests read this directory and no other."""
    make_variant(OWN, tmp_path)
    file = tmp_path / "qwen2_vl/expected.safetensors"
    tensors = load_file(file)
    save_file({name: each.flip(0) if name.endswith(".generated_ids") else each for name, each in tensors.items()}, file)
    status, output = run(tmp_path, "tests/models/families/test_golden.py", "-k", "greedy and qwen2_vl")
    assert status == 1 and "AssertionError" in output
