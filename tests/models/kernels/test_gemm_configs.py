"""Which configurations of the GEMM kernel a GPU takes: a table where one was measured, else what fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from benchmarks.kernels.offline import ARCHITECTURES
from models.layers.kernels import gemm_configs, gemm_types, gpu
from models.layers.kernels.gemm_candidates import candidates
from models.layers.kernels.gemm_configs import config_for, fits, fitted_for, shared_memory_of, streaming_tile, table_of
from models.layers.kernels.gemm_tables import SM_90
from models.layers.kernels.gemm_types import Choice, Shape, Tile, Variant
from models.layers.kernels.gpu import Gpu, named

GPUS = {named(one.capability): one for one in ARCHITECTURES}


@pytest.fixture(params=GPUS)
def here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    found = GPUS[request.param]
    monkeypatch.setattr(gpu, "probe", lambda: found)
    yield found


def operands(rows: int, inputs: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, weight = (torch.empty(n, inputs, device="meta", dtype=torch.bfloat16) for n in (rows, outputs))
    return x, weight


def test_only_hopper_takes_the_table_of_the_h100(here: Gpu) -> None:
    chosen = config_for("plain", *operands(8, 1536, 2048))
    assert chosen == (SM_90[Shape("plain", 1536, 2048)][0].variant if here.capability == (9, 0) else None)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [1, 64, 65, 128])
def test_streamed_weights_fit_every_gpu(here: Gpu, rows: int, gated: bool) -> None:
    tile = streaming_tile(rows, gated=gated)
    assert shared_memory_of(tile, here, gated=gated) <= here.shared_memory
    assert tile.stages >= 2
    if here.capability == (9, 0):
        few = Tile(64, 32, 128, stages=4) if gated else Tile(64, 64, 128, stages=6, swap=True)
        assert tile == (Tile(128, 32, 128, stages=4) if rows > 64 else replace(few, rows=max(16, rows)))


def test_small_cards_have_fewer_stages_and_no_copy_engine() -> None:
    wanted = Tile(64, 64, 128, stages=6, tma=True)
    assert fitted_for(wanted, GPUS["sm_90"]) == wanted
    assert fitted_for(wanted, GPUS["sm_80"]) == Tile(64, 64, 128, stages=5 + 1)
    assert fitted_for(wanted, GPUS["sm_89"]) == Tile(64, 64, 128, stages=4)
    assert fitted_for(wanted, GPUS["sm_120"]) == Tile(64, 64, 128, stages=4, tma=True)


def test_a_tile_too_large_with_two_stages_is_cut_in_depth() -> None:
    small = Gpu("a smaller one", (8, 9), 48 << 10, 20)
    tile = fitted_for(Tile(64, 64, 256, stages=4), small, gated=True)
    assert (tile.rows, tile.columns, tile.stages) == (64, 64, 2)
    assert tile.depth < 256
    assert fits(tile, small, gated=True)


@pytest.mark.parametrize("kind", ["plain", "silu_mul", "add_norm"])
@pytest.mark.parametrize("rows", [8, 64, 512])
def test_candidates_fit_and_differ(here: Gpu, kind: gemm_types.Kind, rows: int) -> None:
    found = list(candidates(Shape(kind, 2048, 2048), rows, here))
    assert len(found) == len(set(found)) >= 3
    assert all(fits(variant.tile, here, gated=kind == "silu_mul") for variant in found)
    assert any(variant.tile.tma for variant in found) == (here.capability >= (9, 0))


def test_a_table_is_used_for_a_while(here: Gpu) -> None:
    variant = Variant(Tile(16, 32, 64))
    table = {Shape("plain", 64, 96): (Choice(2, 8, variant),)}
    with gemm_configs.using(table):
        assert config_for("plain", *operands(8, 64, 96)) == variant
        assert config_for("plain", *operands(9, 64, 96)) is None
        assert gemm_configs.active() is table
    assert gemm_configs.active() == table_of(here)
    assert config_for("plain", *operands(8, 64, 96)) is None
