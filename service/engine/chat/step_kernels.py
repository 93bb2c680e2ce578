"""Triton kernels around the decode step: its inputs from slot state, and filters, choice, stop and state after the
logits.

References: decode_rows, advance_states and sample_tokens of service.engine.chat.steps, and filtered of sampler.py
beside it, whose `uniform` has the random numbers; a token drawn can differ from the reference's only where rounding
moves a border.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.layers.kernels.launch import launch, release_next, wait_for_previous
from models.layers.kernels.random import philox
from models.layers.kv_cache import STATE_INTERVAL
from service.engine.chat.slot_state import IntColumn, SlotState
from service.link.sampling import MAX_STOP_IDS, FloatColumn

_ENTRIES = 256
_BLOCKS = 8
"""Blocks of 256 entries that one program sums."""
_INTS = len(IntColumn)
_FLOATS = len(FloatColumn)
_TOKEN = tl.constexpr(int(IntColumn.TOKEN))
_LENGTH = tl.constexpr(int(IntColumn.LENGTH))
_POSITION = tl.constexpr(int(IntColumn.POSITION))
_GENERATED = tl.constexpr(int(IntColumn.GENERATED))
_ACTIVE = tl.constexpr(int(IntColumn.ACTIVE))
_SEED = tl.constexpr(int(IntColumn.SEED))
_STATE = tl.constexpr(int(IntColumn.STATE))
_SPARE = tl.constexpr(int(IntColumn.SPARE))
_TEMPERATURE = tl.constexpr(int(FloatColumn.TEMPERATURE))


@triton.jit
def _decode_rows_kernel(
    slots_ptr,
    ints_ptr,
    tables_ptr,
    tokens_ptr,
    positions_ptr,
    slot_mapping_ptr,
    out_tables_ptr,
    seq_lens_ptr,
    stride_table,
    max_pages,
    INTS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one row."""
    release_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    state = ints_ptr + slot * INTS
    active = tl.load(state + _ACTIVE) > 0
    length = tl.load(state + _LENGTH)
    tl.store(tokens_ptr + row, tl.load(state + _TOKEN))
    tl.store(positions_ptr + row, tl.load(state + _POSITION))
    tl.store(seq_lens_ptr + row, tl.where(active, length + 1, 0).to(tl.int32))
    table = tables_ptr + slot * stride_table
    page = tl.load(table + tl.minimum(length // PAGE, max_pages - 1)).to(tl.int64)
    tl.store(slot_mapping_ptr + row, tl.where(active, page * PAGE + length % PAGE, 0))
    for first in range(0, max_pages, BLOCK):
        column = first + tl.arange(0, BLOCK)
        here = column < max_pages
        tl.store(out_tables_ptr + row * max_pages + column, tl.load(table + column, mask=here, other=0), mask=here)


def decode_rows(
    slots: Tensor, state: SlotState, max_pages: int, page_size: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """slots int64 [rows] -> tokens, positions, KV slots int64 [rows], tables int32 [rows, pages], lengths int32."""
    rows, device = slots.shape[0], slots.device
    tokens, positions, slot_mapping = (torch.empty(rows, dtype=torch.int64, device=device) for _ in range(3))
    tables = torch.empty((rows, max_pages), dtype=torch.int32, device=device)
    seq_lens = torch.empty(rows, dtype=torch.int32, device=device)
    made = tokens, positions, slot_mapping, tables, seq_lens
    if rows:
        given = slots, state.ints, state.block_tables
        sizes = state.block_tables.stride(0), max_pages
        block = min(1024, triton.next_power_of_2(max_pages))
        launch(_decode_rows_kernel, (rows,), *given, *made, *sizes, INTS=_INTS, PAGE=page_size, BLOCK=block)
    return made


@triton.jit
def _advance_states_kernel(
    slots_ptr, ints_ptr, read_ptr, write_ptr, INTS: tl.constexpr, INTERVAL: tl.constexpr, PDL: tl.constexpr
):
    """One program: one row."""
    release_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    state = ints_ptr + tl.load(slots_ptr + row) * INTS
    active = tl.load(state + _ACTIVE) > 0
    here = tl.load(state + _STATE)
    spare = tl.load(state + _SPARE)
    crossing = active & (tl.load(state + _LENGTH) % INTERVAL == 0)
    following = tl.where(crossing, spare, here)
    tl.store(state + _STATE, following)
    tl.store(state + _SPARE, tl.where(crossing, here, spare))
    tl.store(read_ptr + row, tl.where(active, here, 0))
    tl.store(write_ptr + row, tl.where(active, following, 0))


def advance_states(slots: Tensor, state: SlotState) -> tuple[Tensor, Tensor]:
    """slots int64 [rows] -> rows of recurrent state that are read and written, int64 [rows]; commits them."""
    read, write = torch.empty_like(slots), torch.empty_like(slots)
    if len(slots):
        launch(
            _advance_states_kernel, (len(slots),), slots, state.ints, read, write, INTS=_INTS, INTERVAL=STATE_INTERVAL
        )
    return read, write


@triton.jit
def _load_logits(logits_ptr, allowed_ptr, row, mask_row, column, stride_logits, words, columns, GUIDED: tl.constexpr):
    """Logits of a row at `column`, float32; -inf past its end and at tokens that its mask does not allow."""
    here = column < columns
    logits = tl.load(logits_ptr + row * stride_logits + column, mask=here, other=float("-inf")).to(tl.float32)
    if GUIDED:  # noqa: SIM102 (a constant first: Triton drops the branch)
        # Mask 0 allows everything: rows without a grammar read none.
        if mask_row > 0:
            word = tl.load(allowed_ptr + mask_row * words + column // 32, mask=here, other=0)
            logits = tl.where(((word >> (column % 32)) & 1) == 0, float("-inf"), logits)
    return logits


@triton.jit
def _summarise_kernel(
    logits_ptr,
    allowed_ptr,
    mask_rows_ptr,
    slots_ptr,
    floats_ptr,
    peaks_ptr,
    sums_ptr,
    best_ptr,
    stride_logits,
    words,
    columns,
    blocks,
    FLOATS: tl.constexpr,
    BLOCKS: tl.constexpr,
    ENTRIES: tl.constexpr,
    GUIDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCKS blocks of one row: largest scaled logit, where it is, and the sum of exp(. - largest). The
    largest of a block with a NaN is inf."""
    release_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    temperature = tl.load(floats_ptr + tl.load(slots_ptr + row) * FLOATS + _TEMPERATURE)
    temperature = tl.where(temperature > 0, temperature, 1.0)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    entry = tl.arange(0, ENTRIES)
    column = block[:, None] * ENTRIES + entry[None, :]
    mask_row = tl.load(mask_rows_ptr + row) if GUIDED else 0
    logits = _load_logits(logits_ptr, allowed_ptr, row, mask_row, column, stride_logits, words, columns, GUIDED)
    scaled = tl.div_rn(logits, temperature + tl.zeros_like(column).to(tl.float32))
    peak = tl.max(scaled, 1)
    # A block of nothing but barred entries: -inf - -inf is NaN.
    base = tl.where(peak == float("-inf"), 0.0, peak)
    total = tl.sum(tl.exp(scaled - base[:, None]), 1)
    best = tl.min(tl.where(scaled == peak[:, None], column, columns), 1)
    peak = tl.where(total < float("inf"), peak, float("inf"))  # The sum is NaN with a NaN or inf among them.
    here = block < blocks
    place = row * blocks + block
    tl.store(peaks_ptr + place, peak, mask=here)
    tl.store(sums_ptr + place, total, mask=here)
    tl.store(best_ptr + place, best, mask=here)


@triton.jit
def _uniform(seed, step):
    """Words 0 and 1 of Philox 4x32-10 at counter (0, step, 1, 0) as a float64 in (0, 1)."""
    zero = tl.zeros((1,), tl.uint32)
    c1 = zero + (step & 0xFFFFFFFF).to(tl.uint32)
    k0 = zero + (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = zero + ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c0, c1, _, _ = philox(zero, c1, zero + 1, zero, k0, k1)
    return ((c0 >> 6).to(tl.float64) * 134217728.0 + (c1 >> 5).to(tl.float64) + 0.5) * 1.1102230246251565e-16


@triton.jit
def _first(mask, weights, index, COUNT: tl.constexpr):
    """First true place; where rounding left none, the heaviest."""
    first = tl.min(tl.where(mask, index, COUNT), 0)
    heaviest = tl.min(tl.where(weights == tl.max(weights, 0), index, COUNT), 0)
    return tl.where(first < COUNT, first, heaviest)


@triton.jit
def _choose_kernel(
    logits_ptr,
    allowed_ptr,
    mask_rows_ptr,
    slots_ptr,
    ints_ptr,
    floats_ptr,
    stop_ids_ptr,
    peaks_ptr,
    sums_ptr,
    best_ptr,
    results_ptr,
    stride_logits,
    words,
    columns,
    blocks,
    INTS: tl.constexpr,
    FLOATS: tl.constexpr,
    STOPS: tl.constexpr,
    PADDED: tl.constexpr,
    ENTRIES: tl.constexpr,
    GUIDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one row. Chooses its token, stops it, and writes the slot's next inputs."""
    release_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    state = ints_ptr + slot * INTS
    temperature = tl.load(floats_ptr + slot * FLOATS + _TEMPERATURE)
    active = tl.load(state + _ACTIVE)
    generated = tl.load(state + _GENERATED)
    length = tl.load(state + _LENGTH)
    position = tl.load(state + _POSITION)
    old_token = tl.load(state + _TOKEN)
    index = tl.arange(0, PADDED)
    here = index < blocks
    place = row * blocks + index
    peaks = tl.load(peaks_ptr + place, mask=here, other=float("-inf"))
    peak = tl.max(peaks, 0)
    best = tl.load(best_ptr + place, mask=here, other=columns)
    token = tl.min(tl.where(peaks == peak, best, columns), 0).to(tl.int64)
    if temperature > 0:
        sums = tl.load(sums_ptr + place, mask=here, other=0.0) * tl.exp(peaks - peak)
        ends = tl.cumsum(sums.to(tl.float64), 0)
        target = tl.sum(_uniform(tl.load(state + _SEED), generated), 0) * tl.max(ends, 0)
        block = _first((ends > target) & (sums > 0), sums, index, PADDED)
        start = tl.sum(tl.where(index < block, sums, 0.0).to(tl.float64), 0)
        entry = tl.arange(0, ENTRIES)
        column = block * ENTRIES + entry
        mask_row = tl.load(mask_rows_ptr + row) if GUIDED else 0
        logits = _load_logits(logits_ptr, allowed_ptr, row, mask_row, column, stride_logits, words, columns, GUIDED)
        scaled = tl.div_rn(logits, temperature + tl.zeros_like(column).to(tl.float32))
        weights = tl.exp(scaled - peak)
        ends = start + tl.cumsum(weights.to(tl.float64), 0)
        token = (block * ENTRIES + _first((ends > target) & (weights > 0), weights, entry, ENTRIES)).to(tl.int64)
        # Where a grammar forbids all of them none is found. The answer ends, but its token is looked up all the same.
        token = tl.minimum(token, columns - 1)
    stops = tl.load(stop_ids_ptr + slot * STOPS + tl.arange(0, STOPS))
    corrupt = peak == float("inf")
    token = tl.where(corrupt, 0, token)
    stopped = tl.where(corrupt, -1, tl.max((stops == token).to(tl.int64), 0)) * active
    tl.store(results_ptr + 2 * row, token.to(tl.int32))
    tl.store(results_ptr + 2 * row + 1, stopped.to(tl.int32))
    tl.store(state + _TOKEN, tl.where(active > 0, token, old_token))
    tl.store(state + _LENGTH, length + active)
    tl.store(state + _POSITION, position + active)
    tl.store(state + _GENERATED, generated + active)
    tl.store(state + _ACTIVE, tl.where(stopped == 0, active, 0))


def sample_tokens(logits: Tensor, slots: Tensor, state: SlotState, mask_rows: Tensor | None = None) -> Tensor:
    """logits [rows, columns] of any float dtype, slots int64 [rows], mask_rows int64 [rows] of state.allowed -> results
    int32 [rows, 2] as of service.engine.chat.steps.Sampling; commits them."""
    rows, columns = logits.shape
    guided = mask_rows is not None
    # Without masks neither of their pointers is read.
    given = logits, state.allowed, slots if mask_rows is None else mask_rows, slots
    device = logits.device
    blocks = triton.cdiv(columns, _ENTRIES)
    peaks, sums = (torch.empty((rows, blocks), device=device) for _ in range(2))
    best = torch.empty((rows, blocks), dtype=torch.int32, device=device)
    summary, sizes = (peaks, sums, best), (logits.stride(0), state.allowed.shape[1], columns, blocks)
    results = torch.empty((rows, 2), dtype=torch.int32, device=device)
    if rows == 0:
        return results
    launch(
        _summarise_kernel,
        (rows, triton.cdiv(blocks, _BLOCKS)),
        *given,
        state.floats,
        *summary,
        *sizes,
        FLOATS=_FLOATS,
        BLOCKS=_BLOCKS,
        ENTRIES=_ENTRIES,
        GUIDED=guided,
    )
    launch(
        _choose_kernel,
        (rows,),
        *given,
        state.ints,
        state.floats,
        state.stop_ids,
        *summary,
        results,
        *sizes,
        INTS=_INTS,
        FLOATS=_FLOATS,
        STOPS=MAX_STOP_IDS,
        PADDED=triton.next_power_of_2(blocks),
        ENTRIES=_ENTRIES,
        GUIDED=guided,
    )
    return results


# min_p, top_k and top_p in one kernel, one program per row. The row (0.6 MB of logits at most) stays in the L2 cache
# while two bits of the threshold are found per pass; in plain PyTorch each of the 64 passes would go through memory
# three times.
_BLOCK = 2048
_TOP_K = tl.constexpr(int(IntColumn.TOP_K))
_TOP_P = tl.constexpr(int(FloatColumn.TOP_P))
_MIN_P = tl.constexpr(int(FloatColumn.MIN_P))


@triton.jit
def _ordered(x):
    """float32 -> uint32 in the same order; -0.0 and 0.0 are one number."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return ordered.to(tl.uint32, bitcast=True) ^ 0x80000000


@triton.jit
def _scaled(row_ptr, columns, size, inverse):
    """A product with the inverse temperature keeps the order of the quotients, which is all that is asked of it."""
    return tl.load(row_ptr + columns, mask=columns < size, other=float("-inf")) * inverse


@triton.jit
def _search(row_ptr, size, inverse, floor, peak, limit, target, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key whose equals and betters weigh at least `target`, among entries not under floor and limit."""
    digits = tl.arange(0, 4).to(tl.uint32)
    found = tl.full((), 0, tl.uint32)
    shift = tl.full((), 32, tl.uint32)
    for _ in range(16):
        shift -= 2
        candidates = found + (digits << shift)
        reached = tl.zeros((4,), tl.float32)
        for start in range(0, size, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x = _scaled(row_ptr, columns, size, inverse)
            keys = _ordered(x)
            if WEIGHTED:
                weights = tl.exp(x - peak)
            else:
                weights = tl.full((BLOCK,), 1.0, tl.float32)
            weights = tl.where((columns < size) & (x >= floor) & (keys >= limit), weights, 0.0)
            reached += tl.sum(tl.where(keys[None, :] >= candidates[:, None], weights[None, :], 0.0), axis=1)
        digit = tl.maximum(tl.sum((reached >= target).to(tl.int32), axis=0) - 1, 0)
        found += digit.to(tl.uint32) << shift
    return found


@triton.jit
def _filter_kernel(
    logits_ptr,
    out_ptr,
    ints_ptr,
    floats_ptr,
    size,
    stride,
    INTS: tl.constexpr,
    FLOATS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * stride
    out_row_ptr = out_ptr + row.to(tl.int64) * size
    top_k = tl.load(ints_ptr + row * INTS + _TOP_K)
    top_p = tl.load(floats_ptr + row * FLOATS + _TOP_P)
    temperature = tl.load(floats_ptr + row * FLOATS + _TEMPERATURE)
    inverse = 1.0 / tl.where(temperature > 0, temperature, 1.0)
    peak = tl.full((), float("-inf"), tl.float32)
    for start in range(0, size, BLOCK):
        x = _scaled(row_ptr, start + tl.arange(0, BLOCK), size, inverse)
        peak = tl.maximum(peak, tl.max(x, axis=0))
    floor = peak + tl.log(tl.load(floats_ptr + row * FLOATS + _MIN_P))
    limit = tl.full((), 0, tl.uint32)
    if top_k > 0:
        kept = tl.minimum(top_k, size).to(tl.float32)
        limit = _search(row_ptr, size, inverse, floor, peak, limit, kept, False, BLOCK)
    if top_p < 1.0:
        total = tl.full((), 0.0, tl.float32)
        for start in range(0, size, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            x = _scaled(row_ptr, columns, size, inverse)
            inside = (columns < size) & (x >= floor) & (_ordered(x) >= limit)
            total += tl.sum(tl.where(inside, tl.exp(x - peak), 0.0), axis=0)
        # A target of 0 would be reached by no token at all; the best one always stays.
        target = tl.maximum(top_p * total, 1.1754944e-38)
        narrower = _search(row_ptr, size, inverse, floor, peak, limit, target, True, BLOCK)
        limit = tl.where(narrower > limit, narrower, limit)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = _scaled(row_ptr, columns, size, inverse)
        inside = (x >= floor) & (_ordered(x) >= limit) | ((x < float("inf")) == 0)
        logits = tl.load(row_ptr + columns, mask=columns < size, other=float("-inf"))
        tl.store(out_row_ptr + columns, tl.where(inside, logits, float("-inf")), mask=columns < size)


def filtered(logits: Tensor, ints: Tensor, floats: Tensor) -> Tensor:
    rows, size = logits.shape
    out = torch.empty((rows, size), dtype=logits.dtype, device=logits.device)
    launch(
        _filter_kernel,
        (rows,),
        logits,
        out,
        ints.contiguous(),
        floats.contiguous(),
        size,
        logits.stride(0),
        INTS=len(IntColumn),
        FLOATS=len(FloatColumn),
        BLOCK=_BLOCK,
        num_warps=8,
    )
    return out
