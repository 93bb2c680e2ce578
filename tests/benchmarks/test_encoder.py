"""Rooflines of encoder passes."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest

from benchmarks.encoder import WORK, floor
from models.protocol import Plan

FAMILIES = [name for name in WORK if not name.startswith("qwen3_vl")]
"""Those whose arithmetic depends on the name alone."""


@pytest.fixture
def plan() -> Plan:
    """Two pictures of 256 patches."""
    ends = np.array([0, 256, 512], dtype=np.int32)
    return Plan(dict.fromkeys(("cu_seqlens", "cu_window_seqlens", "cu_slices"), ends), required={})


@pytest.mark.parametrize("name", FAMILIES)
def test_every_measured_family_has_a_roofline(name: str, plan: Plan) -> None:
    assert 0 < floor(name, cast("Any", None), plan, 128) < 0.1


def test_a_family_without_arithmetic_of_its_own_is_an_error(plan: Plan) -> None:
    with pytest.raises(ValueError, match="new_family_2b has no roofline"):
        floor("new_family_2b", cast("Any", None), plan, 128)
