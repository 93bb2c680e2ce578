"""Kernels run on a GPU (`-m gpu`), else in Triton's interpreter at tiny sizes."""

from __future__ import annotations

import os

import pytest
import torch

collect_ignore_glob: list[str] = []
try:
    import triton  # noqa: F401
except ModuleNotFoundError:
    if os.environ.get("CI"):
        raise
    collect_ignore_glob.append("test_*.py")


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """A limit on rounding errors holds for the drawn numbers; another run is to draw the same."""
    torch.manual_seed(1)
