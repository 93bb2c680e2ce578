"""Sampling parameters that the engine accepts fit the tables of its slots: int64 and float32."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from service.link.messages import SamplingParams
from service.link.sampling_limits import LARGEST_FLOAT, LARGEST_INT, sampling_problem

INTS = ("top_k", "min_tokens")
FLOATS = ("temperature", "presence_penalty", "frequency_penalty", "repetition_penalty")
VOCABULARY = 8


def problem(**values: Any) -> tuple[str, str] | None:
    return sampling_problem(SamplingParams(max_tokens=1, **values), VOCABULARY)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, value) for name in INTS for value in (-1, LARGEST_INT + 1, 2**63, 2**64 - 1)),
        *((name, value) for name in FLOATS for value in (1e39, 1e300, math.inf, math.nan)),
        *((name, value) for name in ("presence_penalty", "frequency_penalty") for value in (-1e39, -math.inf)),
    ],
)
def test_what_does_not_fit_is_refused_by_name(name: str, value: float) -> None:
    found = problem(**{name: value})
    assert found is not None and found[0] == name and found[1].startswith(f"{name} is {value}, expected")


@pytest.mark.parametrize("bias", [1e39, -1e300, math.inf, math.nan])
def test_a_bias_that_does_not_fit_is_refused(bias: float) -> None:
    found = problem(logit_bias={1: bias})
    assert found is not None and found[0] == "logit_bias"


def test_the_largest_values_fit() -> None:
    assert problem(**dict.fromkeys(INTS, LARGEST_INT), **dict.fromkeys(FLOATS, LARGEST_FLOAT)) is None
    assert problem(logit_bias={1: -LARGEST_FLOAT}) is None
    assert np.finfo(np.float32).max == LARGEST_FLOAT
