"""`python -P service/launch.py MODULE [ARGUMENT ...]` runs a module of Reprise's own in a child process, even if other
packages on Python's path are called `models` or `service`: both names are common."""

from __future__ import annotations

import os
import runpy
import sys

if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.realpath(__file__))))
    try:
        os.getcwd()
    except FileNotFoundError:  # as of a release that was replaced while its server runs; MKL cannot be loaded there
        os.chdir("/")
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
