"""The pre-norm tower: what one picture takes that is larger than any bucket."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from models.layers import tower
from models.layers.rotary import rotary_cos_sin
from models.layers.tower import TowerBlock, run_tower
from service.engine.live_bytes import LiveBytes
from tests.support.inference import no_gradients as no_gradients

WIDTH, HEADS, ROWS = 32, 2, 80


def blocks(device: str = "cpu") -> tuple[list[TowerBlock], nn.LayerNorm]:
    torch.manual_seed(0)
    with torch.device(device):
        made = [TowerBlock(WIDTH, 4 * WIDTH, HEADS, "gelu", 1e-6) for _ in range(3)]
        return made, nn.LayerNorm(WIDTH, eps=1e-6)


def test_a_long_segment_gives_the_same_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    layers, norm = blocks()
    coordinates = torch.stack([torch.arange(ROWS) // 8, torch.arange(ROWS) % 8])
    frequencies, axes = torch.rand(WIDTH // HEADS // 2), torch.arange(WIDTH // HEADS // 2) % 2
    rotary = rotary_cos_sin(coordinates, frequencies, axes)
    x, ends = torch.randn(ROWS, WIDTH), torch.tensor([0, ROWS], dtype=torch.int32)

    def run() -> Tensor:
        return run_tower(layers, x.clone(), norm, rotary, ends, ROWS)

    whole = run()
    parts = []
    monkeypatch.setattr(tower, "_LONG_SEGMENT", ROWS - 1)
    monkeypatch.setattr(tower, "_ROWS_AT_A_TIME", 24)
    for block in layers:
        block.mlp.register_forward_hook(lambda module, inputs, output: parts.append(len(inputs[0])))
    torch.testing.assert_close(run(), whole, rtol=1e-5, atol=1e-6)
    assert parts == [24, 24, 24, 8] * len(layers)


def test_what_was_read_makes_room_for_what_comes_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the residual stream: queries, keys and values and what was attended, but no norm and no whole inner rows
    of the MLP."""
    monkeypatch.setattr(tower, "_LONG_SEGMENT", ROWS - 1)
    monkeypatch.setattr(tower, "_ROWS_AT_A_TIME", 8)
    monkeypatch.setattr(tower, "attend_packed", lambda qkv, *options: qkv.new_empty(ROWS, HEADS, WIDTH // HEADS))
    layers, norm = blocks("meta")
    x = torch.empty(ROWS, WIDTH, device="meta")
    with LiveBytes() as counted:
        run_tower(layers, x, norm, None, None, ROWS)
    assert counted.peak <= (3 + 1) * x.nbytes
