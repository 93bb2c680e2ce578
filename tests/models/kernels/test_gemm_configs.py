"""Which configurations GEMMs have on each kind of GPU: a table where one was measured, else what fits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from benchmarks.checkpoints.published import make
from benchmarks.kernels import choose
from benchmarks.kernels.gemms import STACKS
from benchmarks.kernels.offline import ARCHITECTURES
from benchmarks.report.formatting import NAMES
from models.checkpoints.registry import family_of, resolve
from models.layers.kernels import e4m3, gemm, gemm_configs, gemm_types, gpu
from models.layers.kernels.gemm_configs import config_for, e4m3_table_of, e4m3_tile, fits, fitted_for, streaming_tile
from models.layers.kernels.gemm_tables import SM_90, SM_90_E4M3, SM_90_E4M3_BLOCKS, SM_90_E4M3_COPIES
from models.layers.kernels.gemm_types import Choice, Shape, Tile, Variant
from models.layers.kernels.gpu import Gpu, named
from models.layers.quantized import GROUP, QuantizedWeight, Scheme
from service.engine.core.worker import WARM_TOKENS
from tests.support.slow import slow

GPUS = {named(one.capability): one for one in ARCHITECTURES}
KINDS: tuple[gemm_types.Kind, ...] = ("plain", "silu_mul", "add_norm")


@pytest.fixture(params=GPUS)
def here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    found = GPUS[request.param]
    monkeypatch.setattr(gpu, "probe", lambda: found)
    monkeypatch.setattr(e4m3, "interpreted", lambda: False)
    yield found


def operands(rows: int, inputs: int, outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, weight = (torch.empty(n, inputs, device="meta", dtype=torch.bfloat16) for n in (rows, outputs))
    return x, weight


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 16, 64, 65, 128, 4096])
def test_tiles_by_rule_fit_every_gpu_and_those_of_codes_take_whole_groups(here: Gpu, rows: int, gated: bool) -> None:
    tile, of_codes = streaming_tile(rows, gated=gated), e4m3_tile(rows, gated=gated)
    for one in (tile, of_codes):
        assert fits(one, here, gated=gated) and one.stages >= 2
    assert of_codes.depth % GROUP == 0
    if here.capability == (9, 0):
        few = Tile(64, 32, 128, stages=4) if gated else Tile(64, 64, 128, stages=6, swap=True)
        few = replace(few, rows=16 if rows <= 16 else 64)
        assert tile == (Tile(128, 32, 128, stages=4) if rows > 64 else few)


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


def e4m3_operands(
    rows: int, inputs: int, outputs: int, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, QuantizedWeight]:
    with torch.device("meta"):
        return torch.empty(rows, inputs, dtype=dtype), QuantizedWeight(outputs, inputs)


def test_the_table_is_what_was_measured() -> None:
    folder = Path("benchmarks/results/kernels")
    times = choose.read_e4m3(folder)
    assert choose.e4m3_tiles(times) == SM_90_E4M3
    assert choose.e4m3_blocks(times, choose.read_e4m3_steps(folder)) == SM_90_E4M3_BLOCKS
    assert choose.e4m3_copies(times) == SM_90_E4M3_COPIES


def test_only_hopper_takes_the_tables_and_another_leaves_codes_alone(here: Gpu) -> None:
    hopper = here.capability == (9, 0)
    x, weight = e4m3_operands(8, 1536, 2048)
    expected = SM_90_E4M3[Shape("plain", 1536, 2048, True)][0].variant if hopper else None
    plain = SM_90[Shape("plain", 1536, 2048)][0].variant if hopper else None
    other = {Shape("plain", 1536, 2048): (Choice(1, 64, Variant(Tile(16, 32, 64))),)}
    assert (config_for("plain", *operands(8, 1536, 2048)), config_for("plain", x, weight)) == (plain, expected)
    with gemm_configs.using(other):
        assert config_for("plain", x, weight) == expected
    assert bool(e4m3_table_of(here)) == hopper


def test_codes_with_wide_groups_have_a_table_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    variant = Variant(Tile(8, 64, 128, warps=2, swap=True), split=2)
    measured = {Shape("plain", 512, 128, codes="u4"): (Choice(2, 8, variant),)}
    monkeypatch.setattr(gemm_configs, "e4m3_table_of", lambda gpu: measured)
    monkeypatch.setattr(gpu, "probe", lambda: GPUS["sm_90"])
    with torch.device("meta"):
        wide, narrow = (QuantizedWeight(128, 512, scheme=Scheme("u4", group)) for group in (128, 32))
        x = torch.empty(8, 512, dtype=torch.bfloat16)
    assert gemm.way_of("plain", x, wide).variant == variant != gemm.way_of("plain", x, narrow).variant


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 64, 65, 300, 2048])
def test_no_gpu_multiplies_a_whole_layer_out(here: Gpu, rows: int, kind: gemm_types.Kind) -> None:
    """Many rows are in 8 bits where tensor cores take them, else in tiles."""
    kernel = gemm.way_of(kind, *e4m3_operands(rows, 4096, 8192)).kernel
    native = here.capability >= (8, 9)
    assert kernel == ("gemv" if rows == 1 else "eight_bit" if native and rows > 64 else "tiled")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs", "dtype"),
    [(8, 192, 64, torch.bfloat16), (8, 256, 64, torch.float32)] + [(n, 128, 96, torch.bfloat16) for n in (2, 64)],
)
def test_what_kernels_do_not_take_is_dequantised(
    here: Gpu, rows: int, inputs: int, outputs: int, dtype: torch.dtype, kind: gemm_types.Kind
) -> None:
    """Activations of few rows are never in eight bits, not even where the outputs are of no width that tiles take."""
    assert gemm.way_of(kind, *e4m3_operands(rows, inputs, outputs, dtype)).kernel == "cublas"


@pytest.mark.parametrize("name", [name if name == "qwen2_vl_2b" else slow(name) for name in NAMES if name != "voxcpm2"])
def test_every_layer_of_the_published_models_has_a_kernel(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(e4m3, "interpreted", lambda: False)
    directory = make(name, tmp_path)
    load = resolve(family_of(directory).model)
    model = load(directory, torch.device("meta"), torch.bfloat16, "random", "fp8")
    weights = {part.shape: where for where, part in model.decoder.named_modules() if isinstance(part, QuantizedWeight)}
    assert weights
    for here in GPUS.values():
        monkeypatch.setattr(gpu, "probe", lambda here=here: here)
        for (outputs, inputs), where in weights.items():
            kind: gemm_types.Kind = "silu_mul" if "gate_up" in where else "plain"
            for rows in (1, 2, 64, 128, 1024):
                assert gemm.way_of(kind, *e4m3_operands(rows, inputs, outputs)).kernel != "cublas", (here, where)


def test_choices_of_prefills_change_at_powers_of_two() -> None:
    """WARM_TOKENS meets them all."""
    for stack in STACKS:
        spans = [stack.span(rows) for rows in stack.rows]
        assert spans[0][0] == stack.least
        assert all(least == before + 1 for (_, before), (least, _) in pairwise(spans))
        assert all(least <= rows <= most for rows, (least, most) in zip(stack.rows, spans, strict=True))
        if stack.name.endswith("prefill"):
            assert all(most.bit_count() == 1 and most <= WARM_TOKENS for _, most in spans)
