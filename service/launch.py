"""Runs a module of Reprise's own, even if other packages on Python's path are called `models` or `service`. Child
processes are started as

    python -P service/launch.py MODULE [ARGUMENT ...]

Both names are common, and a `models.py` on PYTHONPATH would be imported instead of the package beside this folder.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
