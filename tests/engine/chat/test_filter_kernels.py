"""The filter kernel against its reference: on a GPU, else in Triton's interpreter at tiny sizes."""

from __future__ import annotations

import pytest
import torch

from service.engine.chat.sampler import corrupt_rows, filtered
from tests.support.optional import needed

needed("triton")

CASES = [
    (min_p, top_k, top_p) for min_p in (0.0, 0.05, 1.0) for top_k in (0, 1, 13, 5000) for top_p in (0.0, 0.3, 0.95, 1.0)
]


@pytest.mark.parametrize(
    ("size", "scale"),
    [(45, 0.5), (3000, 4.0), *(pytest.param(*c, marks=pytest.mark.slow) for c in ((45, 4.0), (3000, 0.5)))],
)
def test_the_kernel_keeps_what_its_reference_keeps(device: torch.device, size: int, scale: float) -> None:
    cases = CASES[:: 1 if device.type == "cuda" else 7]

    generator = torch.Generator().manual_seed(size)
    x = (torch.randn((len(cases), size), generator=generator) * scale).to(device)
    x[1] = (x[1] * 2).round() / 2
    x[2, ::3] = -torch.inf
    columns = [torch.tensor(values, device=device) for values in zip(*cases, strict=True)]
    temperature = torch.linspace(0.0, 2.0, len(cases), device=device)
    arguments = (temperature, columns[0].float(), columns[1], columns[2].float())
    out, expected = filtered.kernel(x, *arguments), filtered.reference(x, *arguments)
    # Sums of weights are rounded differently: a token at the very border of top_p may go either way.
    assert ((out > -torch.inf) != (expected > -torch.inf)).sum() <= (expected > -torch.inf).sum() * 2e-3
    both = (out > -torch.inf) & (expected > -torch.inf)
    assert torch.equal(out[both], x[both])
    assert (out.argmax(dim=1) == x.argmax(dim=1)).all()


def test_nan_and_inf_stay_for_the_sampler_to_see(device: torch.device) -> None:
    x = torch.randn((len(CASES), 300), generator=torch.Generator().manual_seed(0))
    for row, value in enumerate([torch.nan, -torch.nan, torch.inf] * (len(CASES) // 3)):
        x[row, 6 * row] = value
    columns = [torch.tensor(values, device=device) for values in zip(*CASES, strict=True)]
    arguments = (torch.ones(len(CASES), device=device), columns[0].float(), columns[1], columns[2].float())
    for filter in (filtered.kernel, filtered.reference):
        assert corrupt_rows(filter(x.to(device), *arguments)).all()


def test_rows_of_a_strided_view(device: torch.device) -> None:

    x = torch.randn((3, 70), generator=torch.Generator().manual_seed(0)).to(device)
    ones = torch.ones(3, device=device)
    out = filtered.kernel(x[:, :50], ones, 0 * ones, torch.tensor([5, 0, 2], device=device), ones)
    assert out.shape == (3, 50) and (out > -torch.inf).sum(dim=1).tolist() == [5, 50, 2]
    assert torch.equal(out[1], x[1, :50])
