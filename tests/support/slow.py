"""Cases of a table that only `make test-all` runs."""

from __future__ import annotations

from typing import Any

import pytest


def slow(*values: Any, **options: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow, **options)
