"""Packages that some tests need and the suite can do without."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import pytest


def needed(name: str) -> ModuleType:
    """The module. If it is not installed, the test or the file of tests is skipped; in CI it fails."""
    if os.environ.get("CI"):
        return importlib.import_module(name)
    module: ModuleType = pytest.importorskip(name)
    return module
