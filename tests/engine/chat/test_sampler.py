"""The in-graph sampler against float64 references that sort, and its distributions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from service.engine.chat.sampler import apply_penalties, draw, filtered, log_probabilities, sample, uniform
from service.engine.chat.slot_state import IntColumn, SlotState
from service.link.sampling import FloatColumn, SamplingParams
from tests.support.devices import DEVICES
from tests.support.slow import slow

VOCABULARY = 700


def reference_kept(logits: np.ndarray, min_p: float, top_k: int, top_p: float) -> tuple[np.ndarray, np.ndarray]:
    """What must stay and what may stay (borders within rounding), by sorting in float64."""
    x = logits.astype(np.float64)
    p = np.exp(x - x.max())
    must = may = np.ones(len(x), bool)
    if min_p > 0:
        must, may = must & (p > min_p * (1 + 1e-5)), may & (p >= min_p * (1 - 1e-5))
    if top_k:
        kth = np.sort(np.where(may, x, -np.inf))[::-1][min(top_k, len(x)) - 1]
        must, may = must & (x >= kth), may & (x >= kth)
    if top_p < 1:
        order = np.argsort(-x, kind="stable")
        mass = np.where(may, p, 0.0)
        before = np.empty(len(x))
        cumulated = np.cumsum(mass[order])
        before[order] = cumulated - mass[order]
        # Ties at the border stay together.
        before = np.array([before[(x == value)].min() for value in x])
        total = mass.sum()
        must = must & (before < total * (top_p - 1e-5))
        may = may & (before <= total * (top_p + 1e-5))
    return must, may


@pytest.mark.parametrize("device", DEVICES)
@given(
    seed=st.integers(0, 10_000),
    scale=st.sampled_from([0.1, 1.0, 5.0, 30.0]),
    ties=st.booleans(),
    min_p=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    top_k=st.sampled_from([0, 1, 2, 7, 100, 699, 5000]),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 0.999, 1.0]),
)
@settings(max_examples=50, deadline=None)
def test_filters_keep_what_sorting_keeps(
    device: str, seed: int, scale: float, ties: bool, min_p: float, top_k: int, top_p: float
) -> None:
    logits = np.random.default_rng(seed).normal(size=(1, VOCABULARY)).astype(np.float32) * np.float32(scale)
    if ties:
        logits = np.round(logits * 2) / 2
    row = torch.from_numpy(logits).to(device)
    ints = torch.zeros((1, len(IntColumn)), dtype=torch.int64, device=device)
    ints[0, IntColumn.TOP_K] = top_k
    floats = torch.tensor([SamplingParams(1, min_p=min_p, top_p=top_p).floats()], device=device)
    kept = (filtered(row, ints, floats)[0] > -torch.inf).cpu().numpy()
    must, may = reference_kept(logits[0], min_p, top_k, top_p)
    best = logits[0] == logits[0].max()
    assert (kept | ~must).all(), "a token that belongs to the set was barred"
    assert (may | best)[kept].all(), "a token outside the set was kept"
    assert kept[best].all()


def chi_square(counts: np.ndarray, probabilities: np.ndarray) -> float:
    expected = probabilities * counts.sum()
    pooled = expected >= 5
    observed = np.append(counts[pooled], counts[~pooled].sum())
    expected = np.append(expected[pooled], expected[~pooled].sum())
    used = expected > 0
    statistic = ((observed[used] - expected[used]) ** 2 / expected[used]).sum()
    return float((statistic - used.sum() + 1) / np.sqrt(2 * (used.sum() - 1)))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("temperature", [0.5, slow(1.0), slow(2.0)])
def test_draws_follow_the_distribution(device: str, temperature: float) -> None:
    logits = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(3)) * 2
    rows = 20_000
    uniforms = uniform(torch.arange(rows, device=device), torch.zeros(rows, dtype=torch.int64, device=device))
    tokens = sample(logits.to(device).expand(rows, -1), torch.full((rows,), temperature, device=device), uniforms)
    counts = np.bincount(tokens.cpu().numpy(), minlength=VOCABULARY)
    probabilities = torch.softmax(logits.double() / temperature, 0).numpy()
    # Standard score of the statistic: a correct sampler is within 4 practically always.
    assert abs(chi_square(counts, probabilities)) < 4


def test_uniforms_differ_by_seed_and_step_and_fill_the_interval() -> None:
    seeds, steps = torch.arange(64).repeat_interleave(64), torch.arange(64).repeat(64)
    values = uniform(seeds, steps)
    assert values.unique().numel() == 4096
    assert 0 < float(values.min()) < 0.01 and 0.99 < float(values.max()) < 1
    assert abs(float(values.mean()) - 0.5) < 0.02
    assert uniform(torch.tensor([-1]), torch.tensor([5])) != uniform(torch.tensor([2**32 - 1]), torch.tensor([5]))


@given(st.integers(1, 600), st.integers(0, 100), st.floats(0, 1, exclude_min=True, exclude_max=True))
def test_what_weighs_nothing_is_never_drawn(size: int, seed: int, at: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand((1, size), generator=generator) * (torch.rand((1, size), generator=generator) < 0.1)
    weights[0, seed % size] = 1e-30
    for uniforms in (at, 2.0**-54, 1 - 2.0**-53):
        token = int(draw(weights, torch.tensor([uniforms], dtype=torch.float64)))
        assert weights[0, token] > 0


def state_of(device: str = "cpu", **values: object) -> SlotState:
    """Two live slots, 1 and 2; slot 2 is neutral. values: columns of slot 1."""
    state = SlotState(2, 4, VOCABULARY, torch.device(device))
    state.ints[1:, IntColumn.ACTIVE] = 1
    state.ints[1:, IntColumn.SEED] = 9
    for name, value in values.items():
        column = name.upper()
        if column in FloatColumn.__members__:
            state.floats[1, FloatColumn[column]] = value
        else:
            state.ints[1, IntColumn[column]] = value
    return state


@pytest.mark.parametrize("device", DEVICES)
def test_penalties_bias_and_minimum_length_change_their_own_row_alone(device: str) -> None:
    state = state_of(
        device, repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, min_tokens=3, generated=2
    )
    state.prompt_seen[1, [10, 11]] = True
    state.output_counts[1, 11] = 2
    state.output_counts[2, 11] = 2
    state.stop_ids[:, 0] = 20
    state.bias_ids[1, :2] = torch.tensor([30, 31])
    state.bias_values[1, :2] = torch.tensor([4.0, -100.0])
    logits = torch.randn((2, VOCABULARY), generator=torch.Generator().manual_seed(0)).to(device)
    logits[0, 10], logits[0, 11] = 3.0, -3.0
    slots = torch.tensor([1, 2], device=device)
    out = apply_penalties(logits, slots, state.ints[slots], state.floats[slots], state)
    expected = logits.clone()
    expected[0, 10] = 1.5
    expected[0, 11] = -6.0 - 2 * 0.25 - 0.5
    expected[0, 20] = -torch.inf
    expected[0, 30] += 4.0
    expected[0, 31] -= 100.0
    torch.testing.assert_close(out, expected)
    state.ints[1, IntColumn.GENERATED] = 3
    assert apply_penalties(logits, slots, state.ints[slots], state.floats[slots], state)[0, 20] == logits[0, 20]


@pytest.mark.parametrize("device", DEVICES)
def test_log_probabilities_are_of_the_models_own_distribution(device: str) -> None:
    logits = torch.randn((3, VOCABULARY), generator=torch.Generator().manual_seed(4)) * 4
    tokens = torch.tensor([5, 600, 0])
    chosen, values, ids = log_probabilities(logits.to(device), tokens.to(device), 20)
    reference = torch.log_softmax(logits.double(), dim=-1)
    torch.testing.assert_close(chosen.cpu().double(), reference.gather(1, tokens[:, None])[:, 0], atol=1e-5, rtol=1e-5)
    best, best_ids = reference.topk(20, dim=-1)
    torch.testing.assert_close(values.cpu().double(), best, atol=1e-5, rtol=1e-5)
    assert ids.cpu().tolist() == best_ids.tolist()
