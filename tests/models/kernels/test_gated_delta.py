"""Gated DeltaNet's kernels: bits that do not depend on cuts or drafts, and the sizes of the published models. Their
small sizes are in test_operations.py."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from models.layers.gated_delta import GatedDeltaConfig
from models.layers.kv_cache import StateRows
from models.layers.op import Op
from tests.models.kernels.checking import by_kernels, poisoned_allocations, relative_error, wide_in_place
from tests.models.layers import test_gated_delta as layers


def test_cuts_change_no_bit(device: torch.device) -> None:
    with device, by_kernels(device):
        layers.test_cuts_at_multiples_of_64_change_no_bit(64)


def test_drafts_change_no_bit(device: torch.device) -> None:
    with device, by_kernels(device):
        layers.test_rejected_drafts_leave_no_trace(0.0, 0.0)


def check_sizes(config: GatedDeltaConfig, dtype: torch.dtype, device: torch.device, limit: float) -> None:
    """A prefill with a snapshot, steps, and steps with drafts, on states that hold numbers."""
    with device:
        layer = layers.make(700, 12, config, dtype)
        for state in layer.states.values():
            state.normal_(0.0, 0.1)
        pending = config.pending_spec(3, dtype).items()
        inputs = {name: torch.randn(12, *spec.shape).to(spec.dtype) for name, spec in pending}
        at, counts = torch.tensor([3, 9, 0, 7]), torch.tensor([0, 3, 0, 2])
    wide = layer._replace(
        **dict(zip(layer._fields[:7], wide_in_place(*layer[:7]), strict=True)),
        states={name: state.double() for name, state in layer.states.items()},
    )
    wide_inputs = {name: values.double() for name, values in inputs.items()}

    def run(on: layers.Layer, held: dict[str, Tensor]) -> list[Tensor]:
        snapshots = {"snapshot_rows": [11, 0, 0, 0, 0], "ends": [64, 0, 0, 0, 0]}
        drafted = StateRows([], at, at, inputs=[held], slots=at, pending=counts)
        with device:
            made = [
                on.tokens(0, 640).prefill([0, 1, 330, 333, 640, 640], [0, 1, 2, 0, 0], [3, 4, 2, 5, 0], **snapshots)
            ]
            made.append(on.tokens(0, 5).step([3, 4, 0, 7, 5], [3, 9, 0, 7, 10]))
            return [*made, on.tokens(0, 8).step_with_drafts(drafted), *(state[1:] for state in on.states.values())]

    with by_kernels(device), poisoned_allocations():
        found = run(layer, inputs)
    with patch.object(Op, "__call__", Op.reference):
        expected = run(wide, wide_inputs)
    for out, reference in zip(found, expected, strict=True):
        assert relative_error(out, reference) < limit


@pytest.mark.slow
def test_small_sizes(device: torch.device) -> None:
    check_sizes(GatedDeltaConfig(8, 1, 2, key_dim=16, value_dim=16, norm_eps=1e-6), torch.float32, device, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("key_heads", "value_heads"), [(16, 16), (16, 32), (16, 48), (16, 64)])
def test_sizes_of_the_models(key_heads: int, value_heads: int, dtype: torch.dtype) -> None:
    config = GatedDeltaConfig(8, key_heads, value_heads, key_dim=128, value_dim=128, norm_eps=1e-6)
    check_sizes(config, dtype, torch.device("cuda"), 1e-2 if dtype == torch.bfloat16 else 1e-5)
