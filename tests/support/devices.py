"""Where a test runs: on the CPU always, on a GPU under `pytest -m gpu`."""

from __future__ import annotations

import pytest

DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]
