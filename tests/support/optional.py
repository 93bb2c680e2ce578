"""Packages that a test needs and the suite can do without."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import pytest


def needed(name: str) -> ModuleType:
    """The module; where there is none, the test or the file of tests is skipped. In CI it fails."""
    if os.environ.get("CI"):
        return importlib.import_module(name)
    module: ModuleType = pytest.importorskip(name)
    return module
