"""The kernels around the networks of VoxCPM2's step against their reference, on the golden checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from models.layers.adapters import Lora, LoraBank, LoraLayout
from models.layers.fused import quantize
from models.layers.lora import LoraRows, rows_arrays
from models.protocol import RESULT_FLAGS
from models.voxcpm2.kernels.step import settle
from models.voxcpm2.model import VoxCPM2, load_model
from models.voxcpm2.rows import make_patch, step_inputs
from tests.models.kernels.checking import relative_error, replayed, sixteen_bits
from tests.models.voxcpm2.golden import DIRECTORY
from tests.support.slow import slow

SLOTS, PAGES, PAGE = 9, 16, 16
OVERRUN = 3
"""A slot whose stream has ended."""
FIRST = 7
"""A slot whose prompt is prefilled and whose first patch comes next."""
ROWS = {"one": [4], "padded": [4, OVERRUN, 1, 7, OVERRUN, 0, 0], "more": [9, 2, 5, 0], "first": [FIRST]}

State = dict[str, Tensor]


@pytest.fixture(autouse=True)
def fixed_values() -> None:
    """A stop head's near tie, and a trajectory in 16 bits, may go another way by one rounding."""
    torch.manual_seed(11)


@pytest.fixture(params=["float32", slow("half")])
def dtype(request: pytest.FixtureRequest, device: torch.device) -> torch.dtype:
    return torch.float32 if request.param == "float32" else sixteen_bits(device)


@cache
def voice(device: torch.device, dtype: torch.dtype) -> VoxCPM2:
    model = load_model(DIRECTORY, device, dtype)
    for parameter in model.network.parameters():
        # Kernels read rows of outputs; a CPU's own GEMMs have them the other way round.
        parameter.data = parameter.data.contiguous()
    return model


def random_state(model: VoxCPM2, device: torch.device) -> State:
    """Slot 0 is scratch full of NaN, slot 3 inactive, slot 7 without a patch yet."""
    state = {
        name: torch.zeros((SLOTS + 1, *spec.shape), dtype=spec.dtype)
        for name, spec in model.state_specs().items()
        if name != "vae"
    }
    state["block_table"] = torch.randint(1, 100, (SLOTS + 1, PAGES), dtype=torch.int32)
    state["last_patch"].normal_()
    state["cfg"].uniform_(0.5, 3)
    state["temperature"].uniform_(0.2, 1.5)
    state["length"].random_(0, PAGES * PAGE - 1)
    state["seed"].random_(-(2**63), 2**63 - 1)
    for name, most in (("step", 8), ("min_patches", 6), ("max_patches", 12)):
        state[name].random_(0, most)
    state["step"][FIRST] = 0
    state["active"].fill_(True)
    state["active"][[0, OVERRUN]] = False
    for name in ("last_patch", "cfg", "temperature"):
        state[name][0] = float("nan")
    return {name: table.to(device) for name, table in state.items()}


def copied(state: State) -> State:
    return {name: table.clone() for name, table in state.items()}


def same(one: State, other: State) -> None:
    for name in one:
        torch.testing.assert_close(one[name], other[name], rtol=0, atol=0, equal_nan=True, msg=name)


def nearly(actual: Tensor, expected: Tensor, exact: bool = False) -> None:
    """Of one dtype: float32 up to its rounding, 16 bits up to one that falls the other way, in a value or in a scale of
    many. NaN at the same places."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    assert torch.equal(actual.isnan(), expected.isnan())
    actual, expected = (x.nan_to_num().double() for x in (actual, expected))
    torch.testing.assert_close(actual, expected, rtol=2e-5 if exact else 1e-2, atol=2e-5 if exact else 1e-2)
    if not exact:
        assert relative_error(actual, expected) < 4e-3


@pytest.mark.parametrize("rows", ["padded", slow("one"), slow("more"), "first"])
@torch.inference_mode()
def test_inputs_of_a_step(device: torch.device, dtype: torch.dtype, rows: str) -> None:
    model = voice(device, dtype)
    state, slots = random_state(model, device), torch.tensor(ROWS[rows], device=device)
    expected_state = copied(state)
    ours = replayed_once(state, device, lambda: step_inputs.kernel(slots, model.network, state, PAGE))
    plain = step_inputs.reference(slots, model.network, expected_state, PAGE)
    for name, mine, expected in zip(ours._fields, ours, plain, strict=True):
        if name in ("tokens", "normed"):
            nearly(mine, expected, dtype == torch.float32)
        else:
            assert mine.dtype == expected.dtype
            assert torch.equal(mine, expected), name
    same(state, expected_state)
    if FIRST in ROWS[rows]:
        row = ROWS[rows].index(FIRST)
        assert ours.seq_lens[row] == ours.slot_mapping[row] == 0


def replayed_once(state: State, device: torch.device, run):
    """replayed, with slot state as a single run leaves it."""
    before = copied(state)

    def restored():
        for name, table in state.items():
            table.copy_(before[name])
        return run()

    return replayed(device, restored)


PATCHES = [(4, rows, ()) if rows == "padded" else slow(4, rows, ()) for rows in ROWS]
PATCHES += [slow(solver_steps, "more", ()) for solver_steps in (6, 10, 16)]
IN_ORDER, MIXED = (-1, -1, 0, 0, 1, 1, 2), (1, -1, 2, 1, 0, -1, 0)
PATCHES += [(4, rows, IN_ORDER) if rows == "padded" else slow(4, rows, IN_ORDER) for rows in ROWS]
PATCHES += [slow(4, rows, MIXED) for rows in ROWS]
"""Solver steps, rows and their adapters."""


@pytest.mark.parametrize(("solver_steps", "rows", "adapters"), PATCHES)
@torch.inference_mode()
def test_patches(
    device: torch.device, dtype: torch.dtype, solver_steps: int, rows: str, adapters: Sequence[int]
) -> None:
    """With adapters the two halves of a stream lie side by side here and far apart in the reference."""
    if solver_steps > 4 and dtype != torch.float32:
        pytest.skip("in 16 bits differences grow with the steps")
    slots, model = ROWS[rows], voice(device, dtype)
    network, solver = model.network, model.solver(solver_steps)
    state, index = random_state(model, device), torch.tensor(slots, device=device)
    noise = torch.randn(len(slots), *model.patch_shape[::-1], device=device)
    width = model.network.lm_to_dit_proj.in_features
    lm, residual = (torch.randn(len(slots), width, device=device).to(dtype) for _ in range(2))
    lora = lora_of(model, device, dtype, adapters[: len(slots)]) if adapters else None
    rest = noise, lm, residual, lora
    expected_state = copied(state)
    ours = replayed_once(state, device, lambda: make_patch.kernel(index, network, solver, state, *rest))
    plain = make_patch.reference(index, network, solver, expected_state, *rest)
    flags = len(RESULT_FLAGS)
    assert ours.dtype == torch.float32 and torch.equal(ours[:, -flags:], plain[:, -flags:])
    live = [row for row, slot in enumerate(slots) if slot]
    tolerance = 1e-4 if dtype == torch.float32 else 0.15
    torch.testing.assert_close(ours[live], plain[live], rtol=0, atol=tolerance)
    patches = {name: s.pop("last_patch") for name, s in (("ours", state), ("expected", expected_state))}
    torch.testing.assert_close(patches["ours"], patches["expected"], rtol=0, atol=tolerance, equal_nan=True)
    same(state, expected_state)
    for row, slot in enumerate(slots):
        if slot not in (0, OVERRUN):
            torch.testing.assert_close(patches["ours"][slot].flatten().float(), ours[row, :-flags], rtol=0, atol=0)


def lora_of(model: VoxCPM2, device: torch.device, dtype: torch.dtype, adapters: Sequence[int]) -> Lora:
    bank = LoraBank(LoraLayout(model.lora_places(), ("dit", "lm_to_dit_proj"), 16), 3, device, dtype)
    bank.table.normal_(std=0.1)
    arrays = rows_arrays(np.array(adapters), bank.num_slots)
    tensors = {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}
    return Lora(bank, LoraRows(**tensors, in_order=list(adapters) == sorted(adapters)))


@pytest.mark.parametrize("zero", [False, True], ids=["random", "ties"])
@torch.inference_mode()
def test_stop_head(device: torch.device, dtype: torch.dtype, zero: bool) -> None:
    """All combinations of flags; a tie goes on."""
    rows, size, inputs = 48, 12, 72
    generator = torch.Generator().manual_seed(5)
    hidden, stop = (torch.randn(s, generator=generator).to(device, dtype) for s in ((rows, inputs), (2, inputs)))
    if zero:
        stop.zero_()
    ints = {
        name: torch.randint(0, most, (rows,), generator=generator, dtype=torch.int32).to(device)
        for name, most in (("step", 6), ("min_patches", 6), ("max_patches", 8))
    }
    state = ints | {
        "active": (torch.rand(rows, generator=generator) < 0.7).to(device),
        "cfg": torch.rand(rows, device=device),
        "last_patch": torch.zeros((rows, 3, 4), device=device, dtype=dtype),
    }
    before, slots = copied(state), torch.arange(rows, device=device).flip(0)
    x, velocity = (torch.randn(n, 3, 4, device=device).to(dtype) for n in (rows, 2 * rows))
    results = replayed_once(state, device, lambda: settle(state, slots, x, velocity, 0.1, hidden, stop))
    logits = torch.nn.functional.linear(torch.nn.functional.silu(hidden), stop)
    active, step = before["active"][slots], before["step"][slots]
    stopped = active & (logits[:, 1] > logits[:, 0]) & (step > before["min_patches"][slots])
    finished = stopped | (active & (step + 1 >= before["max_patches"][slots]))
    assert torch.equal(results[:, size:], torch.stack((stopped, finished, active), 1).float())
    assert zero or len(results[:, size:].unique(dim=0)) == 4
    assert torch.equal(state["step"][slots], step + active)
    assert torch.equal(state["active"][slots], active & ~finished)
    assert not state["last_patch"][slots][~active].any()
    assert torch.equal(state["last_patch"][slots][active].flatten(1).float(), results[active, :size])


@pytest.mark.parametrize("shape", [(1, 512), (7, 24), (3, 700)])
def test_quantizer(device: torch.device, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """In 16 bits, ties of the rounding are among the values; in float32 a last bit of tanh decides them."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(device, dtype) * 3
    if dtype != torch.float32:
        x.view(-1)[:19] = torch.atanh(torch.arange(-9, 10, device=device) / 18).to(dtype)
    x.view(-1)[19:22] = torch.tensor([-40.0, 0.0, 40.0])
    out = replayed(device, lambda: quantize.kernel(x, 9))
    assert torch.equal(out.cpu(), quantize.reference(x.cpu(), 9))
