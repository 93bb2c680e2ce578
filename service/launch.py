"""Runs Reprise's own code even if other packages on Python's path are called `models` or `service`. Child processes are
started as

    python -P service/launch.py MODULE [ARGUMENT ...]

Both names are common, and a `models.py` on PYTHONPATH would be imported instead of the package beside this folder. So
child processes and the `reprise` command run this file by its path before they import either.
"""

from __future__ import annotations

import runpy
import sys
from importlib.machinery import PathFinder
from importlib.util import module_from_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("models", "service")


def pin_packages() -> None:
    """Imports `models` and `service` from the folder that contains this one. ImportError if they are not there."""
    for name in PACKAGES:
        spec = PathFinder.find_spec(name, [str(ROOT)])
        if spec is None or spec.loader is None:
            raise ImportError(f"{ROOT / name}: Reprise's package {name!r} is missing; install it again")
        module = module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))


if __name__ == "__main__":
    pin_packages()
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
