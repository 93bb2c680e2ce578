"""Rotary positions of one and three axes, and their frequencies."""

from __future__ import annotations

import pytest
import torch

from models.layers.norms import RMSNorm, rms_norm
from models.layers.rotary import rotate_half_split, section_axes


def test_a_rotation_is_a_complex_product() -> None:
    torch.manual_seed(0)
    x = torch.randn(5, 3, 8)
    angles = torch.randn(5, 4)
    turn = torch.polar(torch.ones(5, 4), angles)[:, None]
    halves = torch.complex(x[..., :4], x[..., 4:]) * turn
    expected = torch.cat((halves.real, halves.imag), dim=-1)
    torch.testing.assert_close(rotate_half_split(x, angles.cos(), angles.sin()), expected)


def test_rms_norm_multiplies_the_weight_in_the_dtype_of_the_model() -> None:
    torch.manual_seed(0)
    norm = RMSNorm(64, 1e-6)
    norm.weight.data = torch.randn(64).bfloat16()
    x = torch.randn(7, 64).bfloat16()
    upcast = x.double()
    normalised = (upcast / (upcast.square().mean(-1, keepdim=True) + 1e-6).sqrt()).bfloat16()
    for made in (norm(x), rms_norm.reference(x, norm.weight, 1e-6)):
        assert torch.equal(made, normalised * norm.weight)


@pytest.mark.parametrize(
    ("sections", "axes"),
    [
        ((4, 2, 1), [0, 1, 2, 0, 1, 0, 0]),
        ((24, 20, 20), [0, 1, 2] * 20 + [0] * 4),
        ((24, 2, 9), [0, 1, 2, 0, 1, 2, 0, 0]),
        ((1, 1, 1), [0, 1, 2, 0, 0, 0]),
    ],
)
def test_interleaved_sections_take_turns_and_time_has_the_rest(sections: tuple[int, ...], axes: list[int]) -> None:
    assert section_axes(sections, interleaved=True, count=len(axes)).tolist() == axes
