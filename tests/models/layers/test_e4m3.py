"""Weights in e4m3 as they are made and dequantised, on the CPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from models.interfaces.errors import CheckpointError
from models.layers.quantized import (
    E4M3,
    LARGEST,
    QuantizedLinear,
    QuantizedWeight,
    for_rows,
    hold_in_e4m3,
    interleaved,
    keep_copies,
    ordered,
    quantise,
    quantise_rows,
    widened,
)

ROUNDING = 1 + 2**-20
"""Of float32's own divisions and products."""


def made(weight: Tensor) -> QuantizedWeight:
    stored = QuantizedWeight(*weight.shape)
    stored.rows.quantise(weight, "made")
    return stored


def assert_near(weight: Tensor, stored: QuantizedWeight) -> None:
    """Off by half a step of e4m3: a sixteenth of the value, of small values half the least step."""
    least = stored.scale.double() * 2**-10
    allowed = torch.maximum(weight.double().abs() / 16, least) * ROUNDING
    # Rows too small for a factor are zeros.
    allowed = torch.where(stored.scale == 0, LARGEST * torch.finfo(torch.float32).tiny, allowed)
    assert ((stored.dequantised(torch.float64) - weight.double()).abs() <= allowed).all()


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(rows=st.lists(st.lists(FLOATS, min_size=5, max_size=5), min_size=1, max_size=4))
def test_every_value_is_within_half_a_step(rows: list[list[float]]) -> None:
    """Of any floats: subnormal, the largest there are, and zeros."""
    weight = torch.tensor(rows)
    stored = made(weight)
    assert_near(weight, stored)
    wide = stored.dequantised(torch.float64)
    assert torch.equal(wide.sign() * weight.double().sign(), (wide != 0).double())


@given(seed=st.integers(0, 1 << 30), inputs=st.sampled_from([128, 192, 384]), exponent=st.integers(-120, 120))
def test_rows_of_very_different_sizes_do_not_disturb_each_other(seed: int, inputs: int, exponent: int) -> None:
    """Values of e4m3 stay as they are."""
    weight = torch.randn(4, inputs, generator=torch.Generator().manual_seed(seed))
    weight[1] *= 2.0**exponent
    weight[2] = 0.0
    weight[3, :4] = torch.tensor([LARGEST, 1.0, -0.5, 2**-9])
    weight[3, 4:] = 0.0
    stored = made(weight)
    assert_near(weight, stored)
    assert torch.equal(stored.values[0].float(), made(weight[:1]).values[0].float())
    assert stored.scale[2] == 0 and torch.equal(stored.dequantised(torch.float32)[2:], weight[2:])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_refused_by_name(value: float) -> None:
    weight = torch.ones(5000, 4)
    weight[4500, 3] = value
    with pytest.raises(CheckpointError, match=r"layers\.3\.gate: .*not finite"):
        QuantizedWeight(5000, 4).rows.quantise(weight, "layers.3.gate")


@pytest.mark.parametrize("width", [64, 128, 512])
def test_the_order_in_memory_is_undone(width: int) -> None:
    values = torch.arange(3 * width).view(3, width)
    there = interleaved(values)
    assert torch.equal(ordered(there), values)
    if width == 512:
        assert there[0, :4].tolist() == [0, 64, 1, 65] and there[0, 128:131].tolist() == [128, 192, 129]


def test_every_code_is_widened_exactly() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    finite = codes[(codes & 0x7F) != 0x7F].view(E4M3)
    assert torch.equal(widened(finite).float(), finite.float())


@given(seed=st.integers(0, 1 << 30), size=st.sampled_from([1e-20, 1.0, 1e20]))
def test_rows_of_activations_keep_their_direction(seed: int, size: float) -> None:
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(seed)) * size
    values, scale = quantise_rows(x)
    again = ordered(values).double() * scale.double()[:, None]
    assert ((again - x.double()).norm(dim=1) <= x.double().norm(dim=1) * 0.04).all()


def test_layers_that_their_owner_names_stay() -> None:
    class Owner(torch.nn.Module):
        sixteen_bit_layers = frozenset({"kept"})

        def __init__(self) -> None:
            super().__init__()
            self.kept, self.given = torch.nn.Linear(8, 4), torch.nn.Linear(8, 4)

    with torch.device("meta"):
        owner = Owner()
        hold_in_e4m3(owner)
    assert isinstance(owner.kept, torch.nn.Linear)
    assert isinstance(owner.given, QuantizedLinear) and owner.given.bias is not None
    assert quantise(torch.zeros(2, 3))[1].tolist() == [0, 0]


def layer_of(inputs: int, outputs: int, device: str) -> torch.nn.Module:
    owner = torch.nn.Sequential(torch.nn.Linear(inputs, outputs, device="meta"))
    hold_in_e4m3(owner)
    if device != "meta":
        owner.to_empty(device=device)
    return owner


@pytest.mark.parametrize(
    ("sizes", "device", "kept"),
    [
        *(((8960, 1536), "meta", True), ((1536, 17920), "meta", False)),
        *(((8960, 1536), "cpu", False), ((8960, 1536), "cuda", False)),
    ],
)
def test_measured_layers_keep_a_copy_in_16_bits(
    sizes: tuple[int, int], device: str, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The meta device is one of a dry run, whose GPU may be any. On a CPU the copy would only cost memory, and this GPU
    was not measured."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    owner = layer_of(*sizes, "meta" if device == "cuda" else device)
    keep_copies(owner, torch.device(device), torch.bfloat16)
    weight = owner[0].weight  # type: ignore[index]
    assert (weight.copy is not None) == kept
    if kept:
        assert weight.copy.shape == weight.shape and weight.copy.dtype == torch.bfloat16
        assert for_rows(weight, weight.copy_from) is weight.copy
        assert for_rows(weight, weight.copy_from - 1) is weight
