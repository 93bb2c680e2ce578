"""Gated DeltaNet's kernels: bits that do not depend on cuts or neighbours, and the sizes of the published models. Their
small sizes are in test_operations.py."""

from __future__ import annotations

from copy import copy

import pytest
import torch
from torch import Tensor

from models.layers.gated_delta import GatedDeltaConfig, causal_conv, delta_chunks, delta_step, pending_conv
from models.layers.kv_cache import StateRows
from tests.models.kernels.checking import poisoned_allocations, relative_error, wide_in_place


class Layer:
    """Inputs of packed rows, parameters and states of one layer."""

    def __init__(self, config: GatedDeltaConfig, rows: int, device: torch.device, dtype: torch.dtype) -> None:
        heads, inner = config.value_heads, config.value_heads * config.value_dim
        self.x = torch.randn(rows, config.channels, device=device).to(dtype)
        self.gates = torch.randn(rows, 2 * heads, device=device).to(dtype)
        self.z = torch.randn(rows, inner, device=device).to(dtype)
        self.conv = (torch.randn(config.channels, 4, device=device) / 2).to(dtype)
        self.heads = torch.linspace(-6.0, 2.7, heads, device=device), torch.randn(heads, device=device)
        self.norm = torch.randn(config.value_dim, device=device)
        self.states = {
            name: (0.1 * torch.randn(12, *spec.shape, device=device)).to(spec.dtype)
            for name, spec in config.state_spec(dtype).items()
        }
        self.inputs = {
            name: torch.randn(12, *spec.shape, device=device).to(spec.dtype)
            for name, spec in config.pending_spec(3, dtype).items()
        }

    def wide(self) -> Layer:
        """In float64, with states of its own."""
        wide = copy(self)
        wide.x, wide.gates, wide.z, wide.conv, wide.norm = wide_in_place(
            self.x, self.gates, self.z, self.conv, self.norm
        )
        wide.heads = self.heads[0].double(), self.heads[1].double()
        wide.states = {name: state.double() for name, state in self.states.items()}
        wide.inputs = {name: values.double() for name, values in self.inputs.items()}
        return wide

    def prefill(self, first: int, bounds: list[int], read: list[int], write: list[int], *, kernel: bool) -> Tensor:
        """Sequences of the rows from `first` on; row 11 gets the state of the first one after 64 tokens."""
        device, end = self.x.device, first + bounds[-1]
        snapshots = torch.tensor([11, *[0] * (len(read) - 1)], device=device)
        ends = torch.full_like(snapshots, 64)
        rows = StateRows([], torch.tensor(read, device=device), torch.tensor(write, device=device), snapshots, ends)
        cu_seqlens = torch.tensor(bounds, device=device, dtype=torch.int32)
        conv, delta = (op.launch if kernel else op.reference for op in (causal_conv, delta_chunks))
        qkv = conv(self.x[first:end], self.conv, self.states["conv"], rows, cu_seqlens)
        return delta(qkv, self.gates[first:end], *self.heads, self.states["delta"], rows, cu_seqlens)

    def taking(self, rows: list[int]) -> Layer:
        """These rows of the inputs, with the same states."""
        taken = copy(self)
        taken.x, taken.gates, taken.z = self.x[rows], self.gates[rows], self.z[rows]
        return taken

    def step_with_drafts(self, places: list[int], pending: list[int], *, kernel: bool) -> Tensor:
        """All rows, as many for each sequence; its row of the state is that of its inputs."""
        at, counts = (torch.tensor(values, device=self.x.device) for values in (places, pending))
        rows = StateRows([], at, at, slots=at, pending=counts)
        conv, delta = (op.launch if kernel else op.reference for op in (pending_conv, delta_step))
        qkv = conv(self.x, self.conv, self.states["conv"], rows, self.inputs["qkv"])
        given = (qkv, self.gates, *self.heads, self.states["delta"], rows, self.z, self.norm, 1e-6)
        return delta(*given, self.inputs["gates"])

    def step(self, read: list[int], write: list[int], *, kernel: bool) -> Tensor:
        count, device = len(read), self.x.device
        rows = StateRows([], torch.tensor(read, device=device), torch.tensor(write, device=device))
        conv, delta = (op.launch if kernel else op.reference for op in (causal_conv, delta_step))
        qkv = conv(self.x[:count], self.conv, self.states["conv"], rows)
        norm = self.z[:count], self.norm, 1e-6
        return delta(qkv, self.gates[:count], *self.heads, self.states["delta"], rows, *norm)


def test_cuts_and_neighbours_change_no_bit(device: torch.device) -> None:
    config = GatedDeltaConfig(8, key_heads=1, value_heads=2, key_dim=16, value_dim=16, norm_eps=1e-6)
    layer = Layer(config, 150, device, torch.float32)
    whole = layer.prefill(0, [0, 130, 150], [0, 0], [1, 2], kernel=True)
    layer.prefill(0, [0, 64], [0], [3], kernel=True)
    rest = layer.prefill(64, [0, 66], [3], [3], kernel=True)
    assert torch.equal(rest, whole[64:130])
    for state in layer.states.values():
        assert torch.equal(state[1], state[3])


def test_drafts_change_no_bit(device: torch.device) -> None:
    """Of the three tokens of a step the second sequence keeps two."""
    config = GatedDeltaConfig(8, key_heads=1, value_heads=2, key_dim=16, value_dim=16, norm_eps=1e-6)
    layer = Layer(config, 6, device, torch.float32)
    plain = copy(layer)
    plain.states = {name: state.clone() for name, state in layer.states.items()}
    out = layer.step_with_drafts([1, 2], [0, 0], kernel=True)
    for token in range(3):
        rows = [1, 2] if token < 2 else [1]
        alone = plain.taking([token, 3 + token]).step(rows, rows, kernel=True)
        assert torch.equal(alone, out[[token, 3 + token][: len(rows)]])
    layer.taking([0, 1]).step_with_drafts([1, 2], [3, 2], kernel=True)
    for name, state in layer.states.items():
        assert torch.equal(state, plain.states[name])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("key_heads", "value_heads"), [(16, 16), (16, 32), (16, 48), (16, 64)])
def test_sizes_of_the_models(key_heads: int, value_heads: int, dtype: torch.dtype) -> None:
    device = torch.device("cuda")
    config = GatedDeltaConfig(8, key_heads, value_heads, key_dim=128, value_dim=128, norm_eps=1e-6)
    layer = Layer(config, 700, device, dtype)
    tolerance = 1e-2 if dtype == torch.bfloat16 else 1e-5
    wide = layer.wide()
    calls = [
        lambda kernel, on: on.prefill(0, [0, 1, 330, 333, 640, 640], [0, 1, 2, 0, 0], [3, 4, 2, 5, 0], kernel=kernel),
        lambda kernel, on: on.step([3, 4, 0, 7, 5], [3, 9, 0, 7, 10], kernel=kernel),
        lambda kernel, on: on.taking([*range(8)]).step_with_drafts([3, 9, 0, 7], [0, 3, 0, 2], kernel=kernel),
    ]
    for call in calls:
        with poisoned_allocations():
            found = call(True, layer)
        expected = call(False, wide)
        assert relative_error(found, expected) < tolerance
        for name, state in layer.states.items():
            assert relative_error(state[1:], wide.states[name][1:]) < tolerance, name
