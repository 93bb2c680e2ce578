"""A broken environment ends a start in one line that says which package to install."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from service.system.packages import unusable
from tests.support.processes import ROOT
from tests.support.waiting import GENEROUS

pytestmark = pytest.mark.slow

WHY = "libx.so: cannot open shared object file"


@pytest.mark.parametrize(("module", "package"), [("av", "av"), ("tokenizers", "tokenizers"), ("yaml", "pyyaml")])
def test_a_start_names_the_package_that_cannot_be_imported(tmp_path: Path, module: str, package: str) -> None:
    """`av` is imported by other processes, `tokenizers` with the models, `yaml` with the command line itself."""
    (tmp_path / f"{module}.py").write_text(
        "raise ImportError('libx.so: cannot open shared object file', name=__name__)"
    )
    command = [sys.executable, "-m", "service.cli", "serve", "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=GENEROUS)
    lines = done.stderr.splitlines()
    assert done.returncode in (1, 2) and lines[-1].endswith(unusable(module, WHY))
    assert f"pip install --force-reinstall {package}" in lines[-1]
    assert "Traceback" not in done.stderr and "never retrieved" not in done.stderr
