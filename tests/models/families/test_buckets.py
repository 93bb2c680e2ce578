"""The buckets that encoders capture by default hold what is usual, with little padding."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from models.kimi_vl.pictures import ImageSettings
from service.graphs.buckets import cheapest
from tests.models.families.family import ALL, FAMILIES, Family, families
from tests.models.families.test_gpu import tower_of_kimi_vl
from tests.support.slow import slow


@pytest.mark.parametrize("family", families(quick=ALL))
def test_default_buckets_ascend_and_hold_every_golden_item(family: Family) -> None:
    encoder = family.model.encoder
    buckets = encoder.default_buckets()
    assert all(one["patches"] < other["patches"] for one, other in pairwise(buckets))
    required = [encoder.required(family.items(name)) for name in family.packs]
    assert all(cheapest(buckets, sizes) is not None for sizes in required)


def test_buckets_hold_whole_embedding_rows() -> None:
    """Also of nine patches, which divide no size of the list."""
    encoder = FAMILIES["qwen2_vl"].fresh("meta", torch.float32, load_format="random").encoder
    encoder.config = replace(encoder.config, merge_size=3)
    assert all(bucket["patches"] % 9 == 0 for bucket in encoder.default_buckets())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "limit"), [("qwen2_5_vl", 12_845_056), ("qwen3_vl", 16_777_216)])
def test_the_lists_of_published_limits_have_no_large_steps(name: str, limit: int) -> None:
    """So pictures of usual sizes have little padding."""
    encoder = FAMILIES[name].fresh("meta", torch.float32, load_format="random").encoder
    encoder.images = replace(encoder.images, max_pixels=limit)
    budgets = [bucket["patches"] for bucket in encoder.default_buckets()]
    assert budgets[-1] == 16_384
    assert all(following <= (1.35 if budget > 256 else 1.5) * budget for budget, following in pairwise(budgets))


@pytest.mark.parametrize(("limit", "largest"), [(4096, 8960), slow(16384, 17928)])
def test_the_list_of_kimi_vl_holds_every_picture_of_the_checkpoint(tmp_path: Path, limit: int, largest: int) -> None:
    encoder = tower_of_kimi_vl(tmp_path, 1, limit, torch.float32, "meta")
    budgets = [bucket["patches"] for bucket in encoder.default_buckets()]
    assert budgets[-1] == largest >= ImageSettings(14, limit, (0.5,) * 3, (0.5,) * 3).most_patches
    # Steps of more than a half would pad more than packing saves.
    assert all(following <= 1.5 * budget for budget, following in pairwise(budgets))
