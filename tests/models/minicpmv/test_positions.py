"""Bucketed position ids against the published torch expression, bit for bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

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


LENGTHS = {70: [*range(1, 1100), 2143, 2263, 4096, 10010], **dict.fromkeys((6, 27, 28, 31, 32, 64, 72), range(1, 200))}
"""Numbers of patches by side of the table. 2.5 sees a slice as one row: up to 1056 patches, and more in extreme
shapes."""

PUBLISHED = """
import json, sys, torch

def published(length, side):
    edges = torch.arange(1 / side, 1.0, 1 / side)
    coordinates = torch.arange(0, 1 - 1e-6, 1 / torch.tensor(length))
    return torch.bucketize(coordinates, edges, right=True).tolist()

asked = json.load(sys.stdin)
json.dump({side: [published(length, int(side)) for length in lengths] for side, lengths in asked.items()}, sys.stdout)
"""


@pytest.fixture(scope="module")
def published() -> dict[str, list[list[int]]]:
    """The ids by side. In a process of its own, because torch steps a range in blocks of the processor's vectors, and
    rounds otherwise where they are longer."""
    asked = json.dumps({side: list(lengths) for side, lengths in LENGTHS.items()})
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "avx2"}
    command = [sys.executable, "-P", "-c", PUBLISHED]
    done = subprocess.run(command, input=asked, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("side", LENGTHS)
def test_every_length(side: int, published: dict[str, list[list[int]]]) -> None:
    for length, ids in zip(LENGTHS[side], published[str(side)], strict=True):
        np.testing.assert_array_equal(buckets(length, side), ids, err_msg=f"length {length}")


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
