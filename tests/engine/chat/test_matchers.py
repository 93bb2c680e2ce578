"""Matchers without the rest of the engine."""

from __future__ import annotations

import subprocess
import sys

from service.system.children import PACKAGE_ROOT


def test_matchers_are_built_without_torch() -> None:
    """A process that does nothing but compute masks is small and starts fast."""
    program = (
        "import service.engine.chat.guided.matchers, sys; print('torch' in sys.modules, 'llguidance' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=PACKAGE_ROOT)
    assert run.stdout.split() == ["False", "True"]
