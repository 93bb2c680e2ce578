"""Bucketed position ids against the published torch expression, bit for bit."""

from __future__ import annotations

import numpy as np
import torch

from models.minicpmv.positions import buckets, position_ids


def test_buckets_are_those_of_the_published_expression() -> None:
    """Some coordinates lie below an edge that they equal."""
    edges, below = torch.arange(1 / 70, 1.0, 1 / 70), 0
    for length in range(1, 1025):
        coordinates = torch.arange(0, 1 - 1e-6, 1 / torch.tensor(length, dtype=torch.float32))
        published = torch.bucketize(coordinates, edges, right=True)
        assert buckets(length, 70).tolist() == published.tolist(), length
        below += int((published < 70 * torch.arange(length) // length).sum())
    assert below > 50


def test_rows_and_columns() -> None:
    ids = position_ids(3, 25, 70).reshape(3, 25)
    np.testing.assert_array_equal(ids[0], buckets(25, 70))
    np.testing.assert_array_equal(ids[:, 0], 70 * buckets(3, 70))
    assert ids.dtype == np.int32
