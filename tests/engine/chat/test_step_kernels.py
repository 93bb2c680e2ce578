"""The kernels around a decode step against their reference."""

from __future__ import annotations

import pytest
import torch

from service.engine.chat.sampler import corrupt_rows, filtered
from service.engine.chat.slot_state import IntColumn, SlotState
from service.engine.chat.steps import advance_states, decode_rows, sample_tokens
from service.link.sampling import MAX_STOP_IDS, FloatColumn
from tests.support.optional import needed
from tests.support.slow import slow

needed("triton")

SLOTS, PAGES, PAGE = 9, 20, 16


def tables(state: SlotState) -> dict[str, torch.Tensor]:
    return {name: table for name, table in vars(state).items() if isinstance(table, torch.Tensor)}


def random_state(vocabulary: int, device: torch.device) -> SlotState:
    """Slot 0 is scratch, slot 3 inactive, even slots are greedy."""
    state = SlotState(SLOTS, PAGES, vocabulary, torch.device("cpu"))
    state.ints.random_(0, PAGES * PAGE - 1)
    state.ints[:, IntColumn.SEED].random_(-(2**63), 2**63 - 1)
    state.ints[:, IntColumn.ACTIVE] = 1
    state.ints[0] = 0
    state.ints[3, IntColumn.ACTIVE] = 0
    state.floats[:, FloatColumn.TEMPERATURE] = torch.rand(SLOTS + 1) * 2
    state.floats[::2, FloatColumn.TEMPERATURE] = 0
    state.stop_ids.copy_(torch.randint(-1, vocabulary, (SLOTS + 1, MAX_STOP_IDS)))
    state.block_tables.random_(1, 100)
    for name, table in tables(state).items():
        setattr(state, name, table.to(device))
    return state


def copied(state: SlotState) -> SlotState:
    expected = SlotState(SLOTS, PAGES, state.prompt_seen.shape[1], torch.device("cpu"))
    for name, table in tables(state).items():
        setattr(expected, name, table.cpu().clone())
    return expected


def test_the_kernel_reads_the_inputs_of_a_step_like_its_reference(device: torch.device) -> None:

    state = random_state(64, device)
    slots = torch.tensor([4, 0, 3, 9, 0])
    ours = decode_rows.kernel(slots.to(device), state, PAGES, PAGE)
    expected = decode_rows.reference(slots, copied(state), PAGES, PAGE)
    for mine, plain in zip(ours, expected, strict=True):
        assert mine.dtype == plain.dtype
        assert torch.equal(mine.cpu(), plain)


def test_the_kernel_swaps_rows_of_state_like_its_reference(device: torch.device) -> None:
    """At a multiple of 64 keys (slots 3, 4 and 5), where the slot is active (not slot 3)."""
    state = random_state(64, device)
    state.ints[1:6, IntColumn.LENGTH] = torch.tensor([1, 63, 64, 128, 0], device=device)
    expected = copied(state)
    slots = torch.tensor([4, 0, 3, 1, 2, 5, 0])
    before = expected.ints[slots, IntColumn.STATE]
    ours = advance_states.kernel(slots.to(device), state)
    read, write = advance_states.reference(slots, expected)
    assert torch.equal(ours[0].cpu(), read) and torch.equal(ours[1].cpu(), write)
    assert torch.equal(state.ints.cpu(), expected.ints)
    assert torch.equal(read, torch.where(torch.isin(slots, torch.tensor([0, 3])), 0, before))
    assert (write != read).tolist() == [True, False, False, False, False, True, False]


@pytest.mark.parametrize(
    ("vocabulary", "dtype"),
    [
        (256, torch.bfloat16),
        *(slow(*case) for case in ((100, torch.float32), (5000, torch.float32), (5000, torch.bfloat16))),
    ],
)
def test_the_kernel_samples_and_writes_state_like_its_reference(
    device: torch.device, vocabulary: int, dtype: torch.dtype
) -> None:

    slots = torch.tensor([4, 0, 3, 9, 5, 1, 7, 0])
    for _ in range(3):
        state = random_state(vocabulary, device)
        expected = copied(state)
        logits = (torch.randn(len(slots), vocabulary + 24) * 4).to(dtype)
        chosen = logits[:, :vocabulary].float().argmax(-1)
        # Ties of the best are left to neither: the reference's argmax may take any.
        logits[torch.arange(len(slots)), chosen] += 1
        mine = sample_tokens.kernel(logits.to(device)[:, :vocabulary], slots.to(device), state)
        plain = sample_tokens.reference(logits[:, :vocabulary], slots, expected)
        assert torch.equal(mine.cpu(), plain)
        assert torch.equal(state.ints.cpu(), expected.ints)


@pytest.mark.parametrize("vocabulary", [100, slow(5000)])
def test_the_kernel_samples_only_what_a_grammar_allows(device: torch.device, vocabulary: int) -> None:
    slots = torch.tensor([4, 0, 3, 9, 5, 1, 7, 0])
    words = -(-vocabulary // 32)
    for share in (0.1, 0.999):
        state = random_state(vocabulary, device)
        expected = copied(state)
        logits = torch.randn(len(slots), vocabulary + 24) * 4
        barred = torch.rand(len(slots), 32 * words) < share
        barred[:, 7] = False
        octets = ((~barred).view(len(slots), -1, 8) * (2 ** torch.arange(8))).sum(2).to(torch.uint8)
        mask_rows = torch.tensor([5, 0, 1, 3, 8, 2, 7, 0])
        barred[mask_rows == 0] = False  # rows without a grammar
        expected.allowed[mask_rows] = octets.view(torch.int32)
        expected.allowed[0] = -1
        state.allowed = expected.allowed.to(device, copy=True)
        state.allowed[0] = 0  # It is not read: rows without a grammar cost no more than in other batches.
        given = logits.to(device)[:, :vocabulary], slots.to(device)
        mine = sample_tokens.kernel(*given, state, mask_rows.to(device))
        plain = sample_tokens.reference(logits[:, :vocabulary], slots, expected, mask_rows)
        assert torch.equal(mine.cpu(), plain)
        assert torch.equal(state.ints.cpu(), expected.ints)
        assert not barred.gather(1, plain[:, :1].long()).any()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:All-NaN:RuntimeWarning")
@pytest.mark.parametrize("vocabulary", [100, slow(5000)])
def test_a_row_in_which_all_is_barred_draws_a_token_of_the_vocabulary(device: torch.device, vocabulary: int) -> None:
    """Its answer ends, but its token counts and its log probability are looked up all the same."""
    state = random_state(vocabulary, device)
    state.floats[1:, FloatColumn.TEMPERATURE] = torch.tensor([0.0, 1.0]).repeat(SLOTS)[:SLOTS]
    state.allowed[1:] = 0
    slots = torch.arange(1, SLOTS + 1)
    logits = torch.randn(SLOTS, vocabulary)
    plain = sample_tokens.reference(logits, slots, copied(state), slots)
    mine = sample_tokens.kernel(logits.to(device), slots.to(device), state, slots.to(device))
    for tokens in (plain[:, 0], mine[:, 0].cpu()):
        assert ((tokens >= 0) & (tokens < vocabulary)).all()


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:All-NaN:RuntimeWarning")
def test_rows_with_nan_or_inf_end_and_others_do_not(device: torch.device) -> None:
    state = random_state(700, device)
    state.floats[1:, FloatColumn.TEMPERATURE] = torch.tensor([0.0, 1.0]).repeat(SLOTS)[:SLOTS]
    slots, mask_rows = torch.arange(1, SLOTS + 1), torch.tensor([0, 0, 0, 0, 0, 0, 1, 2, 0])
    logits = torch.randn(SLOTS, 700)
    logits[0, 3] = logits[1, 699] = logits[2, 0] = torch.nan  # The third row is inactive.
    logits[3], logits[4, 5], logits[5, 5] = torch.nan, torch.inf, -torch.inf
    logits[6, 64] = logits[7, 64] = torch.nan
    state.allowed[0] = -1
    state.allowed[1:3] = torch.tensor([[0, 0, 1], [0, 0, 2]]).repeat(1, 8)[:, : state.allowed.shape[1]]
    expected = copied(state)
    plain = sample_tokens.reference(logits, slots, expected, mask_rows)
    mine = sample_tokens.kernel(logits.to(device), slots.to(device), state, mask_rows.to(device))
    assert torch.equal(mine.cpu(), plain) and torch.equal(state.ints.cpu(), expected.ints)
    assert plain[:, 1].clamp(max=0).tolist() == [-1, -1, 0, -1, -1, 0, -1, 0, 0], "a barred NaN counts for nothing"
    assert not plain[[0, 1, 2, 3, 4, 6], 0].any() and not state.ints[[1, 2, 4, 5, 7], IntColumn.ACTIVE].any()


def filter_state(
    cases: list[tuple[float, int, float]], temperature: torch.Tensor, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of the slot state with (min_p, top_k, top_p) of each case; temperature [cases]."""
    ints = torch.zeros((len(cases), len(IntColumn)), dtype=torch.int64)
    floats = torch.zeros((len(cases), len(FloatColumn)))
    min_p, top_k, top_p = (torch.tensor(values) for values in zip(*cases, strict=True))
    ints[:, IntColumn.TOP_K] = top_k
    floats[:, FloatColumn.MIN_P], floats[:, FloatColumn.TOP_P] = min_p, top_p
    floats[:, FloatColumn.TEMPERATURE] = temperature
    return ints.to(device), floats.to(device)


FILTERS = [
    (min_p, top_k, top_p) for min_p in (0.0, 0.05, 1.0) for top_k in (0, 1, 13, 5000) for top_p in (0.0, 0.3, 0.95, 1.0)
]


@pytest.mark.parametrize(("size", "scale"), [(45, 0.5), *(slow(*c) for c in ((45, 4.0), (3000, 0.5), (3000, 4.0)))])
def test_the_filter_kernel_keeps_what_its_reference_keeps(device: torch.device, size: int, scale: float) -> None:
    cases = FILTERS[:: 1 if device.type == "cuda" else 7]

    generator = torch.Generator().manual_seed(size)
    x = (torch.randn((len(cases), size + 20), generator=generator) * scale).to(device)[:, :size]
    x[1] = (x[1] * 2).round() / 2
    x[2, ::3] = -torch.inf
    arguments = filter_state(cases, torch.linspace(0.0, 2.0, len(cases)), device)
    out, expected = filtered.kernel(x, *arguments), filtered.reference(x, *arguments)
    # Sums of weights are rounded differently: a token at the very border of top_p may go either way.
    assert ((out > -torch.inf) != (expected > -torch.inf)).sum() <= (expected > -torch.inf).sum() * 2e-3
    both = (out > -torch.inf) & (expected > -torch.inf)
    assert torch.equal(out[both], x[both])
    assert (out.argmax(dim=1) == x.argmax(dim=1)).all()


def test_filters_leave_nan_and_inf_for_the_sampler_to_see(device: torch.device) -> None:
    cases = FILTERS[::8]
    x = torch.randn((len(cases), 300), generator=torch.Generator().manual_seed(0))
    for row, value in enumerate([torch.nan, -torch.nan, torch.inf] * (len(cases) // 3)):
        x[row, 6 * row] = value
    arguments = filter_state(cases, torch.ones(len(cases)), device)
    for filter in (filtered.kernel, filtered.reference):
        assert corrupt_rows(filter(x.to(device), *arguments)).all()
