from __future__ import annotations

import pytest
import torch
from torch import Tensor

from models.layers.kernels.vae import residual_unit_cuda, snake_upsample_cuda
from models.voxcpm2.vae_layers import residual_unit_reference, snake_upsample_reference
from tests.models.kernels.checking import poisoned_allocations, relative_error, wide_in_place

TF32 = 1e-3


def positive(*shape: int, device: torch.device) -> Tensor:
    return torch.rand(*shape, device=device) * 3 + 0.2


def unit_inputs(rows: int, width: int, length: int, device: torch.device) -> tuple[Tensor, ...]:
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device)

    return (
        random(rows, width, length),
        positive(width, device=device),
        random(width, 1, 7),
        random(width),
        positive(width, device=device),
        random(width, width, 1) * width**-0.5,
        random(width),
    )


def memory_of(table: Tensor, width: int, pad: int) -> Tensor:
    return table[:, 10 : 10 + width * pad].unflatten(1, (width, pad))


def check_unit(rows, width, length, dilation, device, precision, limit) -> None:
    x, alpha_in, weight, bias, alpha_out, *pointwise = unit_inputs(rows, width, length, device)
    pad = 6 * dilation
    table = torch.randn(rows + 3, 20 + width * pad, device=device)
    slots = torch.randperm(rows + 3, device=device)[:rows]
    arguments = (x, alpha_in, weight, bias, dilation, alpha_out, *pointwise)
    wide_table = table.double()
    expected = residual_unit_reference(*wide_in_place(*arguments), memory_of(wide_table, width, pad), slots)
    with poisoned_allocations():
        out = residual_unit_cuda(*arguments, memory_of(table, width, pad), slots, precision=precision)
        fresh = residual_unit_cuda(*arguments, precision=precision)
    assert relative_error(out, expected) < limit
    assert relative_error(table, wide_table) < 1e-6
    assert relative_error(fresh, residual_unit_reference(*wide_in_place(*arguments))) < limit


def check_upsample(rows, width, length, stride, device, precision, limit) -> None:
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device)

    x, scale, shift, alpha = random(rows, width, length), random(width), random(width), positive(width, device=device)
    weight, bias = random(width, width // 2, 2 * stride) * width**-0.5, random(width // 2)
    table = random(rows + 3, 20 + width)
    slots = torch.randperm(rows + 3, device=device)[:rows]
    wide_table = table.double()

    arguments = (x, scale, shift, alpha, weight, bias, stride)
    expected = snake_upsample_reference(*wide_in_place(*arguments), memory_of(wide_table, width, 1), slots)
    with poisoned_allocations():
        out = snake_upsample_cuda(*arguments, memory_of(table, width, 1), slots, precision=precision)
        fresh = snake_upsample_cuda(*arguments, precision=precision)
    assert relative_error(out, expected) < limit
    assert relative_error(table, wide_table) < 1e-6
    assert relative_error(fresh, snake_upsample_reference(*wide_in_place(*arguments))) < limit


def test_tf32_products_keep_the_strength_of_a_signal(device) -> None:
    """Cut off instead of rounded, operands would take 3e-4 each."""
    x, scale, weight = (torch.rand(shape, device=device) for shape in ((3, 64, 24), (64,), (64, 32, 4)))
    weight = ((weight.view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)
    arguments = (x, scale, scale, scale + 0.5, weight, scale[:32], 2)
    out = snake_upsample_cuda(*arguments, precision="tf32").double()
    expected = snake_upsample_reference(*wide_in_place(*arguments))
    assert abs(float((out * expected).sum() / expected.square().sum()) - 1) < 2e-5


@pytest.mark.parametrize(("width", "length", "dilation"), [(32, 40, 1), (32, 20, 9), (64, 24, 3)])
def test_residual_unit_tiny(device, width, length, dilation) -> None:
    check_unit(2, width, length, dilation, device, "ieee", 1e-6)


@pytest.mark.parametrize(("width", "length", "stride"), [(64, 4, 8), (32, 12, 5), (64, 24, 2)])
def test_upsample_tiny(device, width, length, stride) -> None:
    check_upsample(3, width, length, stride, device, "ieee", 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("dilation", [1, 3, 9])
@pytest.mark.parametrize(("width", "length"), [(1024, 32), (512, 192), (256, 960), (128, 1920), (64, 3840), (32, 7680)])
def test_residual_unit(rows, width, length, dilation) -> None:
    check_unit(rows, width, length, dilation, torch.device("cuda"), "tf32", TF32)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize(
    ("width", "length", "stride"),
    [(2048, 4, 8), (1024, 32, 6), (512, 192, 5), (256, 960, 2), (128, 1920, 2), (64, 3840, 2)],
)
def test_upsample(rows, width, length, stride) -> None:
    check_upsample(rows, width, length, stride, torch.device("cuda"), "tf32", TF32)
