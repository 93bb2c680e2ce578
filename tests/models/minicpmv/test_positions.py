"""Bucketed position ids against the published torch expression, bit for bit."""

from __future__ import annotations

import numpy as np

from models.minicpmv.positions import buckets, position_ids

# Indices whose bucket is one below floor(70 * i / n); no other length up to 110 has any.
BELOW_THE_FLOOR = {
    25: {5, 10, 15, 20},
    49: {7, 14, 35, 42},
    50: {5, 10, 15, 20, 30, 40},
    55: {11, 22, 33, 44},
    58: {29},
    77: {55},
    82: {41},
    86: {43},
    94: {47},
    98: {7, 14, 35, 42, 56, 70, 84},
    100: {10, 20, 30, 40, 80},
    110: {11, 22, 33, 44, 66, 88},
}


def test_exceptional_lengths() -> None:
    for length in range(1, 111):
        below = {i for i in range(length) if buckets(length, 70)[i] != 70 * i // length}
        assert below == BELOW_THE_FLOOR.get(length, set())
        assert all(buckets(length, 70)[i] == 70 * i // length - 1 for i in below)


def test_rows_and_columns() -> None:
    ids = position_ids(3, 25, 70).reshape(3, 25)
    np.testing.assert_array_equal(ids[0], buckets(25, 70))
    np.testing.assert_array_equal(ids[:, 0], 70 * buckets(3, 70))
    assert ids.dtype == np.int32
