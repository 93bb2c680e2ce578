"""The buckets that encoders capture by default hold what is usual, with little padding."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from models.interfaces.capturable import Bucket
from models.interfaces.media import MediaItem
from models.kimi_vl.pictures import ImageSettings
from models.qwen_vl.pictures import smart_resize
from service.graphs.buckets import cheapest, combine, pack
from tests.models.families.family import ALL, FAMILIES, Family, families
from tests.support.encoder_replay import grid_item
from tests.support.golden import change_json, copy_checkpoint
from tests.support.slow import slow

KIMI_TOWER = {"num_attention_heads": 16, "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 1}


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


LIMITS = {"qwen2_5_vl": (3136, 12_845_056), "qwen3_vl": (65_536, 16_777_216)}


@cache
def published(name: str) -> tuple[Any, list[Bucket]]:
    """An encoder with the published limits of pictures."""
    encoder = FAMILIES[name].fresh("meta", torch.float32, load_format="random").encoder
    encoder.images = replace(encoder.images, max_pixels=LIMITS[name][1])
    return encoder, encoder.default_buckets()


def picture(name: str, height: int, width: int, frames: int = 1) -> MediaItem:
    patch = 14 if name == "qwen2_5_vl" else 16
    least, most = LIMITS[name]
    h, w = smart_resize(height, width, factor=2 * patch, min_pixels=least, max_pixels=most)
    return grid_item(frames, h // patch, w // patch)


USUAL = {
    "448x448": [(448, 448)],
    "640x480": [(480, 640)],
    "1920x1080": [(1080, 1920)],
    "16 frames of 448x448": [(448, 448, 16)],
    "four pictures": [(448, 448)] * 4,
    "a picture and a video": [(1024, 1024), (448, 448, 16)],
}


@pytest.mark.slow
@pytest.mark.parametrize("usual", USUAL)
@pytest.mark.parametrize("name", LIMITS)
def test_usual_inputs_are_padded_by_at_most_15_percent(name: str, usual: str) -> None:
    encoder, bucket_list = published(name)
    sizes = [encoder.required([picture(name, *size)]) for size in USUAL[usual]]
    buckets = [group.bucket for group in pack(sizes, bucket_list)]
    assert None not in buckets
    assert sum(bucket["patches"] for bucket in buckets if bucket) <= 1.15 * combine(sizes)["patches"]


@pytest.mark.parametrize(("limit", "largest"), [(4096, 8960), slow(16384, 17928)])
def test_the_list_of_kimi_vl_holds_every_picture_of_the_checkpoint(tmp_path: Path, limit: int, largest: int) -> None:
    family = FAMILIES["kimi_vl"]
    directory = copy_checkpoint(family.directory, tmp_path / "limit")
    vision = json.loads((directory / "config.json").read_text())["vision_config"]
    change_json(directory / "config.json", {"vision_config": vision | KIMI_TOWER})
    change_json(directory / "preprocessor_config.json", {"in_token_limit": limit})
    budgets = [b["patches"] for b in family.fresh("meta", torch.float32, directory, "random").encoder.default_buckets()]
    assert budgets[-1] == largest >= ImageSettings(14, limit, (0.5,) * 3, (0.5,) * 3).most_patches
    # Steps of more than a half would pad more than packing saves.
    assert all(following <= 1.5 * budget for budget, following in pairwise(budgets))
