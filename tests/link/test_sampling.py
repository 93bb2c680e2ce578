"""Sampling parameters that the engine accepts fit the tables of its slots: int64 and float32."""

from __future__ import annotations

import math
from typing import Any

import pytest

from service.link.sampling import BOUNDS, MAX_BIAS, SamplingParams, sampling_problem

VOCABULARY = 8


def problem(**values: Any) -> tuple[str, str] | None:
    return sampling_problem(SamplingParams(max_tokens=1, **values), VOCABULARY)


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, (low, high) in BOUNDS.items() for value in (low - 1, high + 1, 1e300, math.inf, math.nan)],
)
def test_what_does_not_fit_is_refused_by_name(name: str, value: float) -> None:
    found = problem(**{name: value})
    assert found is not None and found[0] == name and found[1].startswith(f"{name} is {value}, expected")


@pytest.mark.parametrize("bias", [1e39, -1e300, math.inf, math.nan])
def test_a_bias_that_does_not_fit_is_refused(bias: float) -> None:
    found = problem(logit_bias={1: bias})
    assert found is not None and found[0] == "logit_bias"


def test_the_largest_values_fit() -> None:
    for end in (0, 1):
        assert problem(**{name: bounds[end] for name, bounds in BOUNDS.items()}) is None
    assert problem(logit_bias={1: -MAX_BIAS}) is None
    assert {"temperature", "top_p", "top_k", "min_p", "min_tokens"} < BOUNDS.keys()
