"""Gated DeltaNet: convolution with state, single tokens of the recurrence, chunks of it, and gates.

References: models.layers.gated_delta, and models.layers.fused.sigmoid_mul.

Chunks take two kernels: one makes the matrices of all chunks at the same time, the other walks along each sequence with
the state in registers. Nothing is added in an order that depends on timing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from models.layers.gated_delta import CONV_WIDTH, UNIT_EPS
from models.layers.kernels.gpu import current_gpu
from models.layers.kernels.launch import dot_precision, launch, release_next, wait_for_previous
from models.layers.kernels.varlen import bounds_of, segment_of_tile
from models.layers.kv_cache import STATE_INTERVAL, StateRows

_EPS: tl.constexpr = tl.constexpr(UNIT_EPS)
_CHUNK: tl.constexpr = tl.constexpr(STATE_INTERVAL)
_TAPS: tl.constexpr = tl.constexpr(CONV_WIDTH)
_BLOCK_C = 512
"""Channels of one program of the convolution of a step; of chunks an eighth."""
_BLOCK_V = 32
"""Columns of the state that a program of the scan holds."""
_TWO_CHUNKS = 160_000
"""Bytes of shared memory with which a program of the scan loads the next chunk while it computes one."""
_BUFFERS = ["read_ptr", "write_ptr", "snapshot_rows_ptr", "snapshot_ends_ptr", "cu_ptr", "slots_ptr", "pending_ptr"]
"""Parts of one upload, at any multiple of 8 bytes."""


@triton.jit
def _chunk_of(tile, cu_ptr, num_rows, num_sequences):
    """Number of a tile's sequence (segment_of_tile), the tile's first row, and the first and the end of the sequence's
    rows."""
    sequence = segment_of_tile(tile, cu_ptr, num_sequences, _CHUNK, 64)
    begin, end = bounds_of(sequence, cu_ptr, num_rows, num_sequences)
    return sequence, begin + (tile - begin // _CHUNK - sequence) * _CHUNK, begin, end


@triton.jit
def _conv_input(x_ptr, before, begin, index, channel, here, held, stride_x, C: tl.constexpr):
    """Row `index` of a sequence that begins at row `begin` of x. Negative ones are those of the state before, zeros
    unless `held`."""
    own = x_ptr + (begin + index).to(tl.int64) * stride_x + channel
    earlier = before + (index + (_TAPS - 1)) * C + channel
    # One of the two is 0.
    x = tl.load(own, mask=here & (index >= 0), other=0.0)
    return x + tl.load(earlier, mask=here & (index < 0) & held, other=0.0)


@triton.jit
def _taps_of(weight_ptr, channel, here):
    taps = weight_ptr + channel * _TAPS
    w0, w1 = tl.load(taps, mask=here, other=0.0), tl.load(taps + 1, mask=here, other=0.0)
    w2, w3 = tl.load(taps + 2, mask=here, other=0.0), tl.load(taps + 3, mask=here, other=0.0)
    return w0.to(tl.float32), w1.to(tl.float32), w2.to(tl.float32), w3.to(tl.float32)


@triton.jit(do_not_specialize=["num_rows", "num_sequences"], do_not_specialize_on_alignment=_BUFFERS)
def _conv_kernel(
    x_ptr,
    weight_ptr,
    state_ptr,
    out_ptr,
    read_ptr,
    write_ptr,
    snapshot_rows_ptr,
    snapshot_ends_ptr,
    cu_ptr,
    num_rows,
    num_sequences,
    stride_x,
    C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_C channels of one chunk, without bounds of one row, which is a sequence. The first chunk of a
    sequence, which alone reads the state before, writes the one after."""
    release_next(PDL)
    tile = tl.program_id(0)
    sequence, first, begin, end = tile, tile, tile, tile + 1
    if cu_ptr is not None:
        sequence, first, begin, end = _chunk_of(tile, cu_ptr, num_rows, num_sequences)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    here, known = channel < C, sequence < num_sequences
    read = tl.load(read_ptr + sequence, mask=known, other=0).to(tl.int64)
    weights = _taps_of(weight_ptr, channel, here)
    wait_for_previous(PDL)
    if (first >= end) & (first > begin):
        return
    before = state_ptr + read * ((_TAPS - 1) * C)
    row = first + tl.arange(0, BLOCK_T)[:, None]
    kept = (row < end) & here[None, :]
    total = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    for tap in tl.static_range(_TAPS):
        index = row - begin + (tap - (_TAPS - 1))
        x = _conv_input(x_ptr, before, begin, index, channel[None, :], kept & known, read > 0, stride_x, C)
        total = tl.fma(x.to(tl.float32), weights[tap][None, :], total)
    out = out_ptr + row.to(tl.int64) * C + channel[None, :]
    tl.store(out, (total * tl.sigmoid(total)).to(out_ptr.dtype.element_ty), mask=kept)
    if (first > begin) | (sequence == num_sequences):
        return
    tl.debug_barrier()  # the row may be the one that others of these threads read
    write = tl.load(write_ptr + sequence).to(tl.int64)
    for column in tl.static_range(_TAPS - 1):
        # A later column never reads what an earlier one has written.
        index = end - begin + (column - (_TAPS - 1))
        value = _conv_input(x_ptr, before, begin, index, channel, here, read > 0, stride_x, C)
        tl.store(state_ptr + (write * (_TAPS - 1) + column) * C + channel, value, mask=here & (write > 0))
    if snapshot_rows_ptr is not None:
        snapshot = tl.load(snapshot_rows_ptr + sequence).to(tl.int64)
        taken = tl.load(snapshot_ends_ptr + sequence)
        for column in tl.static_range(_TAPS - 1):
            index = taken + (column - (_TAPS - 1))
            value = _conv_input(x_ptr, before, begin, index, channel, here & (snapshot > 0), False, stride_x, C)
            place = state_ptr + (snapshot * (_TAPS - 1) + column) * C + channel
            tl.store(place, value, mask=here & (snapshot > 0))


def causal_conv(x: Tensor, weight: Tensor, state: Tensor, rows: StateRows, cu_seqlens: Tensor | None = None) -> Tensor:
    """models.layers.gated_delta.causal_conv."""
    num_rows, channels = x.shape
    out = torch.empty((num_rows, channels), device=x.device, dtype=x.dtype)
    if num_rows == 0:
        return out
    sequences, step = rows.read.shape[0], cu_seqlens is None
    block_c = min(_BLOCK_C if step else _BLOCK_C // 8, triton.next_power_of_2(channels))
    launch(
        _conv_kernel,
        (num_rows if step else _tiles(num_rows, sequences), triton.cdiv(channels, block_c)),
        x,
        weight,
        state,
        out,
        rows.read,
        rows.write,
        rows.snapshot_rows,
        rows.snapshot_ends,
        cu_seqlens,
        num_rows,
        sequences,
        x.stride(0),
        C=channels,
        BLOCK_T=1 if step else STATE_INTERVAL,
        BLOCK_C=block_c,
        num_warps=4,
    )
    return out


@triton.jit(do_not_specialize=["held"], do_not_specialize_on_alignment=_BUFFERS)
def _pending_conv_kernel(
    x_ptr,
    weight_ptr,
    state_ptr,
    inputs_ptr,
    out_ptr,
    read_ptr,
    write_ptr,
    slots_ptr,
    pending_ptr,
    held,
    stride_x,
    C: tl.constexpr,
    OWN: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_C channels of one sequence, token by token with the last three inputs in registers."""
    release_next(PDL)
    wait_for_previous(PDL)
    sequence = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    here = channel < C
    read, write = tl.load(read_ptr + sequence).to(tl.int64), tl.load(write_ptr + sequence).to(tl.int64)
    slot, pending = tl.load(slots_ptr + sequence).to(tl.int64), tl.load(pending_ptr + sequence).to(tl.int32)
    w0, w1, w2, w3 = _taps_of(weight_ptr, channel, here)
    before, known = state_ptr + read * ((_TAPS - 1) * C) + channel, here & (read > 0)
    x0 = tl.load(before, mask=known, other=0.0)
    x1 = tl.load(before + C, mask=known, other=0.0)
    x2 = tl.load(before + 2 * C, mask=known, other=0.0)
    inputs = inputs_ptr + slot * held * C + channel
    out = out_ptr + sequence * (held + OWN) * C + channel
    for token in range(pending):
        x3 = tl.load(inputs + token * C, mask=here, other=0.0)
        tl.store(out + token * C, _convolved(x0, x1, x2, x3, w0, w1, w2, w3), mask=here)
        x0, x1, x2 = x1, x2, x3
    tl.debug_barrier()  # the state's row and the inputs' may be those that others of these threads read
    after = state_ptr + write * ((_TAPS - 1) * C) + channel
    kept = here & (write > 0)
    tl.store(after, x0, mask=kept)
    tl.store(after + C, x1, mask=kept)
    tl.store(after + 2 * C, x2, mask=kept)
    for token in tl.static_range(OWN):
        x3 = tl.load(x_ptr + (sequence * OWN + token) * stride_x + channel, mask=here, other=0.0)
        tl.store(inputs + token * C, x3, mask=here)
        tl.store(out + (held + token) * C, _convolved(x0, x1, x2, x3, w0, w1, w2, w3), mask=here)
        x0, x1, x2 = x1, x2, x3


@triton.jit
def _convolved(x0, x1, x2, x3, w0, w1, w2, w3):
    """silu of the sum, with the operations of _conv_kernel: the compiler must not choose which product is rounded."""
    total = tl.fma(x1.to(tl.float32), w1, x0.to(tl.float32) * w0)
    total = tl.fma(x3.to(tl.float32), w3, tl.fma(x2.to(tl.float32), w2, total))
    return (total * tl.sigmoid(total)).to(x3.dtype)


def pending_conv(x: Tensor, weight: Tensor, state: Tensor, rows: StateRows, inputs: Tensor) -> Tensor:
    """models.layers.gated_delta.pending_conv."""
    sequences, (num_rows, channels), held = rows.read.shape[0], x.shape, inputs.shape[1]
    own = num_rows // sequences
    out = torch.empty((sequences * (held + own), channels), device=x.device, dtype=x.dtype)
    block_c = min(_BLOCK_C, triton.next_power_of_2(channels))
    launch(
        _pending_conv_kernel,
        (sequences, triton.cdiv(channels, block_c)),
        x,
        weight,
        state,
        inputs,
        out,
        rows.read,
        rows.write,
        rows.slots,
        rows.pending,
        held,
        x.stride(0),
        C=channels,
        OWN=own,
        BLOCK_C=block_c,
        num_warps=4,
    )
    return out


def _tiles(num_rows: int, sequences: int) -> int:
    """Programs that hold every chunk, and the rows behind the last one."""
    return num_rows // STATE_INTERVAL + sequences + 1


@triton.jit
def _unit(x, AXIS: tl.constexpr):
    """x divided by its length along an axis, in float32."""
    x = x.to(tl.float32)
    return x * tl.expand_dims(tl.rsqrt(tl.sum(x * x, AXIS) + _EPS), AXIS)


@triton.jit
def _gates_of(gates, here, head, A_log_ptr, dt_bias_ptr, HEADS: tl.constexpr):
    """beta and the logarithm of the decay in float32, of rows of gates that begin at `gates`; 0 where not `here`."""
    b = tl.load(gates + head, mask=here, other=0.0).to(tl.float32)
    a = tl.load(gates + HEADS + head, mask=here, other=0.0).to(tl.float32) + tl.load(dt_bias_ptr + head)
    # softplus; log(1 + y) as y log(u) / (u - 1) of the rounded u = 1 + y, which keeps the digits of a small y.
    y = tl.exp(tl.minimum(a, 20.0))
    u = 1.0 + y
    soft = tl.where(u == 1.0, y, y * tl.log(u) / tl.where(u == 1.0, 1.0, u - 1.0))
    decay = -tl.exp(tl.load(A_log_ptr + head)) * tl.where(a > 20.0, a, soft)
    return tl.where(here, tl.sigmoid(b), 0.0), tl.where(here, decay, 0.0)


@triton.jit
def _advanced(
    state, qkv, gates, head, A_log_ptr, dt_bias_ptr, KEY_HEADS: tl.constexpr, HEADS: tl.constexpr, DK: tl.constexpr,
    DV: tl.constexpr,
):  # fmt: skip
    """The state [DK, DV] of a value head after one more token, whose values begin at `qkv` and `gates`."""
    d, e = tl.arange(0, DK), tl.arange(0, DV)
    k = _unit(tl.load(qkv + (KEY_HEADS + head // (HEADS // KEY_HEADS)) * DK + d), 0)
    v = tl.load(qkv + 2 * KEY_HEADS * DK + head * DV + e).to(tl.float32)
    beta, decay = _gates_of(gates, True, head, A_log_ptr, dt_bias_ptr, HEADS)
    state *= tl.exp(decay)
    error = beta * (v - tl.sum(state * k[:, None], 0))
    return state + k[:, None] * error[None, :]


@triton.jit(do_not_specialize=["held"], do_not_specialize_on_alignment=_BUFFERS)
def _step_kernel(
    qkv_ptr,
    gates_ptr,
    A_log_ptr,
    dt_bias_ptr,
    state_ptr,
    inputs_ptr,
    read_ptr,
    write_ptr,
    slots_ptr,
    pending_ptr,
    z_ptr,
    norm_ptr,
    out_ptr,
    held,
    stride_z,
    eps,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    OWN: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one value head of one sequence, with its whole state in registers. With `inputs` the state after the
    pending tokens is stored, else that after the one of this step."""
    release_next(PDL)
    head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    key_head = head // (HEADS // KEY_HEADS)
    C: tl.constexpr = 2 * KEY_HEADS * DK + HEADS * DV
    d, e = tl.arange(0, DK), tl.arange(0, DV)
    # On their way before the convolution has ended: rows and states are of before the step (launch.py).
    read, write = tl.load(read_ptr + sequence).to(tl.int64), tl.load(write_ptr + sequence).to(tl.int64)
    cell = d[:, None] * DV + e[None, :]
    state = tl.load(state_ptr + (read * HEADS + head) * (DK * DV) + cell, mask=read > 0, other=0.0)
    wait_for_previous(PDL)
    place = state_ptr + (write * HEADS + head) * (DK * DV) + cell
    qkv = qkv_ptr + sequence * (held + OWN) * C
    inputs = inputs_ptr
    if inputs_ptr is not None:
        inputs += tl.load(slots_ptr + sequence).to(tl.int64) * held * (2 * HEADS)
        for token in range(tl.load(pending_ptr + sequence).to(tl.int32)):
            state = _advanced(
                state, qkv + token * C, inputs + token * (2 * HEADS), head, A_log_ptr, dt_bias_ptr, KEY_HEADS, HEADS,
                DK, DV,
            )  # fmt: skip
        tl.debug_barrier()  # the inputs may be those that others of these threads read
        tl.store(place, state, mask=write > 0)
        qkv += held * C
    for token in tl.static_range(OWN):
        row = sequence * OWN + token
        gates = gates_ptr + row * (2 * HEADS)
        state = _advanced(state, qkv, gates, head, A_log_ptr, dt_bias_ptr, KEY_HEADS, HEADS, DK, DV)
        if inputs_ptr is None:
            tl.store(place, state, mask=write > 0)
        else:
            for half in tl.static_range(2):
                gate = half * HEADS + head
                tl.store(inputs + token * (2 * HEADS) + gate, tl.load(gates + gate))
        q = _unit(tl.load(qkv + key_head * DK + d), 0) * (DK**-0.5)
        out = tl.sum(state * q[:, None], 0)
        normed = out * tl.rsqrt(tl.sum(out * out, 0) / DV + eps) * tl.load(norm_ptr + e)
        z = tl.load(z_ptr + row * stride_z + head * DV + e).to(tl.float32)
        stored = out_ptr + (row * HEADS + head) * DV + e
        tl.store(stored, (normed * z * tl.sigmoid(z)).to(out_ptr.dtype.element_ty))
        qkv += C


def delta_step(
    qkv: Tensor,
    gates: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    rows: StateRows,
    z: Tensor,
    norm_weight: Tensor,
    eps: float,
    inputs: Tensor | None = None,
) -> Tensor:
    """models.layers.gated_delta.delta_step."""
    _, heads, key_dim, value_dim = state.shape
    large = key_dim * value_dim >= 16384
    out = torch.empty(z.shape, device=z.device, dtype=z.dtype)
    sequences = rows.read.shape[0]
    if sequences == 0:
        return out
    launch(
        _step_kernel,
        (heads, sequences),
        qkv,
        gates,
        A_log,
        dt_bias,
        state,
        inputs,
        rows.read,
        rows.write,
        rows.slots,
        rows.pending,
        z,
        norm_weight,
        out,
        0 if inputs is None else inputs.shape[1],
        z.stride(0),
        eps,
        KEY_HEADS=_key_heads(qkv, state),
        HEADS=heads,
        DK=key_dim,
        DV=value_dim,
        OWN=gates.shape[0] // sequences,
        num_warps=8 if large else 4,
        # With the 143 that it would take a multiprocessor has one program, which waits for its own loads and stores.
        **({"maxnreg": 128} if large else {}),
    )
    return out


def _key_heads(qkv: Tensor, state: Tensor) -> int:
    _, heads, key_dim, value_dim = state.shape
    return (qkv.shape[1] - heads * value_dim) // (2 * key_dim)


@triton.jit
def _unit_rows(qkv_ptr, row, kept, key_head, C: tl.constexpr, DK: tl.constexpr):
    """Rows of a query or key head, each of length 1: float32 [64, DK], 0 where not kept."""
    places = qkv_ptr + row[:, None] * C + key_head * DK + tl.arange(0, DK)[None, :]
    return _unit(tl.load(places, mask=kept[:, None], other=0.0), 1)


@triton.jit(do_not_specialize=["num_rows", "num_sequences"], do_not_specialize_on_alignment=_BUFFERS)
def _matrices_kernel(
    qkv_ptr,
    gates_ptr,
    A_log_ptr,
    dt_bias_ptr,
    matrices_ptr,
    out_ptr,
    cu_ptr,
    num_rows,
    num_sequences,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: one value head of one chunk. Writes (I + A)^-1, A the strictly lower triangle of beta K K^T D, and
    Q K^T D, in rows of 64 values each; behind the last sequence zeros as outputs."""
    release_next(PDL)
    wait_for_previous(PDL)
    sequence, first, _, end = _chunk_of(tl.program_id(0), cu_ptr, num_rows, num_sequences)
    if first >= end:
        return
    head = tl.program_id(1)
    i, j = tl.arange(0, _CHUNK)[:, None], tl.arange(0, _CHUNK)[None, :]
    row = (first + tl.arange(0, _CHUNK)).to(tl.int64)
    kept = row < end
    if sequence == num_sequences:
        place = out_ptr + (row[:, None] * HEADS + head) * DV + tl.arange(0, DV)[None, :]
        tl.store(place, tl.zeros((_CHUNK, DV), out_ptr.dtype.element_ty), mask=kept[:, None])
        return
    key_head = head // (HEADS // KEY_HEADS)
    C: tl.constexpr = 2 * KEY_HEADS * DK + HEADS * DV
    beta, decay = _gates_of(gates_ptr + row * (2 * HEADS), kept, head, A_log_ptr, dt_bias_ptr, HEADS)
    total = tl.cumsum(decay, 0)
    # exp(-total) overflows: subtract first.
    fading = tl.where(i >= j, tl.exp(tl.where(i >= j, total[:, None] - total[None, :], 0.0)), 0.0)
    place = matrices_ptr + (row[:, None] * HEADS + head) * (2 * _CHUNK) + j
    q = _unit_rows(qkv_ptr, row, kept, key_head, C, DK) * (DK**-0.5)
    k = _unit_rows(qkv_ptr, row, kept, KEY_HEADS + key_head, C, DK)
    attended = tl.dot(q, tl.trans(k), input_precision=PRECISION) * fading
    tl.store(place + _CHUNK, attended, mask=kept[:, None])
    similar = tl.dot(k, tl.trans(k), input_precision=PRECISION)
    triangle = tl.where(i > j, beta[:, None] * similar * fading, 0.0)
    # Diagonal blocks of 2, 4, ... 64 rows: the inverse of [[P, 0], [C, Q]] is [[P', 0], [-Q' C P', Q']].
    inverse = tl.where(i == j, 1.0, 0.0) - tl.where(i // 2 == j // 2, triangle, 0.0)
    for level in tl.static_range(1, 6):
        joined = (i // (2 << level) == j // (2 << level)) & (i // (1 << level) != j // (1 << level))
        link = tl.dot(inverse, tl.where(joined, triangle, 0.0), input_precision=PRECISION)
        inverse -= tl.dot(link, inverse, input_precision=PRECISION)
    tl.store(place, inverse, mask=kept[:, None])


@triton.jit(do_not_specialize=["num_sequences"], do_not_specialize_on_alignment=_BUFFERS)
def _scan_kernel(
    qkv_ptr,
    gates_ptr,
    A_log_ptr,
    dt_bias_ptr,
    matrices_ptr,
    state_ptr,
    out_ptr,
    read_ptr,
    write_ptr,
    snapshot_rows_ptr,
    snapshot_ends_ptr,
    cu_ptr,
    num_sequences,
    KEY_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_V columns of the state of one value head, along every num_programs(2)th sequence. A captured
    prefill has room for many more sequences than it mostly holds, and a program takes microseconds to find nothing."""
    release_next(PDL)
    wait_for_previous(PDL)
    head = tl.program_id(1)
    key_head = head // (HEADS // KEY_HEADS)
    C: tl.constexpr = 2 * KEY_HEADS * DK + HEADS * DV
    e = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)[None, :]
    cell = tl.arange(0, DK)[:, None] * DV + e
    for sequence in range(tl.program_id(2), num_sequences, tl.num_programs(2)):
        read, write = tl.load(read_ptr + sequence).to(tl.int64), tl.load(write_ptr + sequence).to(tl.int64)
        begin, end = tl.load(cu_ptr + sequence), tl.load(cu_ptr + sequence + 1)
        if (begin < end) | (write > 0):
            state = tl.load(state_ptr + (read * HEADS + head) * (DK * DV) + cell, mask=read > 0, other=0.0)
            for first in range(begin, end, _CHUNK):
                row = (first + tl.arange(0, _CHUNK)).to(tl.int64)
                kept = row < end
                beta, decay = _gates_of(gates_ptr + row * (2 * HEADS), kept, head, A_log_ptr, dt_bias_ptr, HEADS)
                total = tl.cumsum(decay, 0)
                faded = tl.exp(total)[:, None]
                q = _unit_rows(qkv_ptr, row, kept, key_head, C, DK) * (DK**-0.5)
                out = faded * tl.dot(q, state, input_precision=PRECISION)
                k = _unit_rows(qkv_ptr, row, kept, KEY_HEADS + key_head, C, DK)
                v = qkv_ptr + row[:, None] * C + 2 * KEY_HEADS * DK + head * DV + e
                v = tl.load(v, mask=kept[:, None], other=0.0).to(tl.float32)
                error = beta[:, None] * (v - faded * tl.dot(k, state, input_precision=PRECISION))
                matrices = matrices_ptr + (row[:, None] * HEADS + head) * (2 * _CHUNK) + tl.arange(0, _CHUNK)[None, :]
                inverse = tl.load(matrices, mask=kept[:, None], other=0.0)
                values = tl.dot(inverse, error, input_precision=PRECISION)
                attended = tl.load(matrices + _CHUNK, mask=kept[:, None], other=0.0)
                out = tl.dot(attended, values, acc=out, input_precision=PRECISION)
                place = out_ptr + (row[:, None] * HEADS + head) * DV + e
                tl.store(place, out.to(out_ptr.dtype.element_ty), mask=kept[:, None])
                # Not tl.sum(decay): another order of addition gives other last digits; exp(last - total) must end at 1.
                last = tl.sum(tl.where(tl.arange(0, _CHUNK) == _CHUNK - 1, total, 0.0), 0)
                values *= tl.exp(last - total)[:, None]
                state = tl.dot(tl.trans(k), values, acc=state * tl.exp(last), input_precision=PRECISION)
                if snapshot_rows_ptr is not None:
                    snapshot = tl.load(snapshot_rows_ptr + sequence).to(tl.int64)
                    taken = (snapshot > 0) & (first + _CHUNK == begin + tl.load(snapshot_ends_ptr + sequence))
                    tl.store(state_ptr + (snapshot * HEADS + head) * (DK * DV) + cell, state, mask=taken)
            tl.store(state_ptr + (write * HEADS + head) * (DK * DV) + cell, state, mask=write > 0)


def delta_chunks(
    qkv: Tensor, gates: Tensor, A_log: Tensor, dt_bias: Tensor, state: Tensor, rows: StateRows, cu_seqlens: Tensor
) -> Tensor:
    """models.layers.gated_delta.delta_chunks."""
    _, heads, key_dim, value_dim = state.shape
    num_rows, sequences = qkv.shape[0], rows.read.shape[0]
    out = torch.empty((num_rows, heads, value_dim), device=qkv.device, dtype=qkv.dtype)
    if num_rows == 0:
        return out
    matrices = torch.empty((num_rows, heads, 2, STATE_INTERVAL), device=qkv.device)
    inputs = (qkv, gates, A_log, dt_bias, matrices)
    sizes = {"KEY_HEADS": _key_heads(qkv, state), "HEADS": heads, "DK": key_dim, "DV": value_dim}
    precision = dot_precision(qkv)
    launch(
        _matrices_kernel,
        (_tiles(num_rows, sequences), heads),
        *inputs,
        out,
        cu_seqlens,
        num_rows,
        sequences,
        **sizes,
        PRECISION=precision,
        num_warps=4,
    )
    block_v = min(_BLOCK_V, value_dim)
    blocks = value_dim // block_v
    ahead = qkv.element_size() == 2 and current_gpu().shared_memory >= _TWO_CHUNKS
    launch(
        _scan_kernel,
        (blocks, heads, min(sequences, max(1, 2 * current_gpu().num_sms // (blocks * heads)))),
        *inputs,
        state,
        out,
        rows.read,
        rows.write,
        rows.snapshot_rows,
        rows.snapshot_ends,
        cu_seqlens,
        sequences,
        **sizes,
        BLOCK_V=block_v,
        PRECISION=precision,
        num_warps=4 if ahead else 8,
        num_stages=2 if ahead else 1,
    )
    return out


@triton.jit(do_not_specialize=["heads"])
def _gated_kernel(
    x_ptr,
    z_ptr,
    weight_ptr,
    out_ptr,
    heads,
    stride_row,
    stride_head,
    stride_z,
    eps,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program: BLOCK_H of the `heads` heads of all rows. With weights their norms times silu(z), else they
    themselves times sigmoid(z)."""
    release_next(PDL)
    wait_for_previous(PDL)
    head = (tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    here = (head < heads) & (column < WIDTH)
    x = tl.load(x_ptr + head * WIDTH + column, mask=here, other=0.0).to(tl.float32)
    z = z_ptr + head // HEADS * stride_row + head % HEADS * stride_head + column * stride_z
    z = tl.load(z, mask=here, other=0.0).to(tl.float32)
    gate = tl.sigmoid(z)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, mask=column < WIDTH, other=0.0)
        x *= tl.rsqrt(tl.sum(x * x, 1) / WIDTH + eps)[:, None] * weight
        gate *= z
    tl.store(out_ptr + head * WIDTH + column, (x * gate).to(out_ptr.dtype.element_ty), mask=here)


def _gated(x: Tensor, z: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """x [n, heads, width] and z of the same shape, any strides -> z's dtype."""
    rows, heads, width = x.shape
    out = torch.empty(x.shape, device=x.device, dtype=z.dtype)
    if x.numel() == 0:
        return out
    block = triton.next_power_of_2(width)
    block_h = max(1, 1024 // block)
    launch(
        _gated_kernel,
        (triton.cdiv(rows * heads, block_h),),
        x.contiguous(),
        z,
        weight,
        out,
        rows * heads,
        *z.stride(),
        eps,
        HEADS=heads,
        WIDTH=width,
        BLOCK=block,
        BLOCK_H=block_h,
        num_warps=4,
    )
    return out


def gated_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """models.layers.gated_delta.gated_norm."""
    return _gated(x, z.unflatten(-1, x.shape[1:]), weight, eps).view(z.shape)


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """models.layers.fused.sigmoid_mul."""
    heads, gates = (x, gate) if x.dim() == 3 else (x[:, None], gate[:, None])
    return _gated(heads, gates.expand_as(heads), None, 0.0).view(x.shape)
