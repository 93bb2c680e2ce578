"""Random numbers as a function of seed and step."""

from __future__ import annotations

import pytest
import torch

from models.layers.random import philox, philox_normal


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers_of_random123(counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]) -> None:
    c0, c1, c2, c3 = map(torch.tensor, counter)
    k0, k1 = map(torch.tensor, key)
    assert tuple(word.item() for word in philox((c0, c1, c2, c3), (k0, k1))) == words


def test_rows_are_functions_of_seed_and_step_alone() -> None:
    seeds = torch.tensor([3, -3, 2**62 + 1, 3, 3 + 2**32])
    steps = torch.tensor([0, 0, 9, 1, 0], dtype=torch.int32)
    together = philox_normal(seeds, steps, 256)
    for row in range(5):
        alone = philox_normal(seeds[row : row + 1], steps[row : row + 1], 256)
        torch.testing.assert_close(together[row], alone[0], atol=0, rtol=0)
    assert len({values.sum().item() for values in together}) == 5


def test_statistics() -> None:
    """Moments, tails and correlations of a million values, in float64, within five standard errors."""
    rows, count = 1024, 1024
    values = philox_normal(torch.arange(rows) // 8, torch.arange(rows) % 8, count).double()
    total = rows * count
    for power, moment, variance in ((1, 0.0, 1.0), (2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0)):
        assert abs(values.pow(power).mean().item() - moment) < 5 * (variance / total) ** 0.5
    for bound, share in ((1.0, 0.3173105), (2.0, 0.0455003), (3.0, 0.0026998)):
        error = 5 * (share * (1 - share) / total) ** 0.5
        assert abs((values.abs() > bound).double().mean().item() - share) < error
    for first, second in ((values[:, :-1], values[:, 1:]), (values[:-1], values[1:]), (values[:-8], values[8:])):
        assert abs((first * second).mean().item()) < 5 / first.numel() ** 0.5
