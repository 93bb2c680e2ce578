"""Stacks of blocks and towers: what is computed together or in parts equals one after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from models.layers import tower
from models.layers.rotary import rotary_cos_sin
from models.layers.tower import TowerBlock, run_tower
from service.engine.memory import LiveBytes
from tests.models.kernels.checking import relative_error
from tests.support.inference import no_gradients as no_gradients

TOWER_WIDTH, HEADS, ROWS = 128, 2, 80


DTYPES = {"cpu": torch.float32, "cuda": torch.bfloat16}


def blocks(device: str = "cpu") -> tuple[list[TowerBlock], nn.LayerNorm]:
    torch.manual_seed(0)
    with torch.device("meta" if device == "meta" else "cpu"):
        made = [TowerBlock(TOWER_WIDTH, 4 * TOWER_WIDTH, HEADS, "quick_gelu", 1e-6) for _ in range(3)]
        norm = nn.LayerNorm(TOWER_WIDTH, eps=1e-6)
    dtype = DTYPES.get(device, torch.float32)
    return [block.to(device, dtype) for block in made], norm.to(device, dtype)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_long_segment_gives_the_same_in_parts(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    layers, norm = blocks(device)
    coordinates = torch.stack([torch.arange(ROWS) // 8, torch.arange(ROWS) % 8]).to(device)
    frequencies, axes = torch.rand(TOWER_WIDTH // HEADS // 2), torch.arange(TOWER_WIDTH // HEADS // 2) % 2
    rotary = rotary_cos_sin(coordinates, frequencies.to(device), axes.to(device))
    x, ends = torch.randn(ROWS, TOWER_WIDTH).to(device, DTYPES[device]), torch.tensor([0, ROWS], dtype=torch.int32)

    def run() -> Tensor:
        return run_tower(layers, x.clone(), norm, rotary, ends.to(device), ROWS)

    whole, parts = run(), []
    monkeypatch.setattr(tower, "_LONG_SEGMENT", ROWS - 1)
    monkeypatch.setattr(tower, "_ROWS_AT_A_TIME", 24)
    for block in layers:
        block.mlp.register_forward_hook(lambda module, inputs, output: parts.append(len(inputs[0])))
    assert relative_error(run(), whole) < (1e-6 if device == "cpu" else 8e-3)
    assert parts == [24, 24, 24, 8] * len(layers)


def test_what_was_read_makes_room_for_what_comes_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the residual stream: queries, keys and values and what was attended, but no norm and no whole inner rows
    of the MLP."""
    monkeypatch.setattr(tower, "_LONG_SEGMENT", ROWS - 1)
    monkeypatch.setattr(tower, "_ROWS_AT_A_TIME", 8)
    monkeypatch.setattr(tower, "attend_packed", lambda qkv, *options: qkv.new_empty(ROWS, HEADS, TOWER_WIDTH // HEADS))
    layers, norm = blocks("meta")
    x = torch.empty(ROWS, TOWER_WIDTH, device="meta")
    with LiveBytes() as counted:
        run_tower(layers, x, norm, None, None, ROWS)
    assert counted.peak <= (3 + 1) * x.nbytes
