"""Gated DeltaNet (arXiv:2412.06464): a short causal convolution, then a linear recurrence with a matrix state per head.

Per value head, with queries and keys of length 1, in float32:

    S = exp(g) S;  S += k (beta (v - S^T k))^T;  o = S^T q

Decode rows advance it by one token; prefill chunks by the same rule in chunks of 64 tokens. Tokens that may be rejected
do not advance it: their inputs are kept, and the next step begins with those that were accepted. Value head h reads key
head h // (value heads / key heads). Row 0 of every state is scratch, as models.layers.kv_cache.StateRows says.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.interfaces.capturable import BufferSpec
from models.layers.attention import row_segments
from models.layers.gemm import gemm, narrow_gemm
from models.layers.kv_cache import STATE_INTERVAL as CHUNK
from models.layers.kv_cache import PagedBatch, StateRows
from models.layers.norms import Normed
from models.layers.op import op
from models.layers.precision import upcast

CONV_WIDTH = 4
UNIT_EPS = 1e-6
"""Added to the sum of squares of a query or key, whatever the config's epsilon is."""


@dataclass(frozen=True)
class GatedDeltaConfig:
    """Sizes of a GatedDeltaNet; head sizes are powers of two from 16."""

    hidden_size: int
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    norm_eps: float

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def state_spec(self, dtype: torch.dtype) -> dict[str, BufferSpec]:
        """A sequence's state in one layer of a model of `dtype`: the last inputs of the convolution, the oldest first,
        and S."""
        return {
            "conv": BufferSpec((CONV_WIDTH - 1, self.channels), dtype),
            "delta": BufferSpec((self.value_heads, self.key_dim, self.value_dim), torch.float32),
        }

    def pending_spec(self, tokens: int, dtype: torch.dtype) -> dict[str, BufferSpec]:
        """A sequence's inputs of `tokens` tokens in one layer (StateRows.inputs)."""
        widths = {"qkv": self.channels, "gates": 2 * self.value_heads}
        return {name: BufferSpec((tokens, width), dtype) for name, width in widths.items()}


class GatedDeltaNet(nn.Module):
    """The mixer of a layer. The caller applies `out` and adds its result to x.

    in_qkvz holds the rows of q, k, v and z, in_ba those of b and a, each head by head. conv [channels, 4]: the last tap
    is the current token's.
    """

    float32_parameters = frozenset({"A_log", "dt_bias", "norm"})
    sixteen_bit_layers = frozenset({"in_ba"})

    def __init__(self, config: GatedDeltaConfig) -> None:
        super().__init__()
        inner = config.value_heads * config.value_dim
        self.widths = (config.channels, inner)
        self.in_qkvz = nn.Linear(config.hidden_size, config.channels + inner, bias=False)
        self.in_ba = nn.Linear(config.hidden_size, 2 * config.value_heads, bias=False)
        self.conv = nn.Parameter(torch.empty(config.channels, CONV_WIDTH))
        self.A_log = nn.Parameter(torch.empty(config.value_heads))
        self.dt_bias = nn.Parameter(torch.empty(config.value_heads))
        self.norm = nn.Parameter(torch.empty(config.value_dim))
        self.out = nn.Linear(inner, config.hidden_size, bias=False)
        self.eps = config.norm_eps

    def forward(self, normed: Normed, layer: int, batch: PagedBatch) -> Tensor:
        """[n, hidden_size], decode rows or prefill chunks as `batch` says -> [n, value_heads * value_dim].

        layer: index into batch.states.layers, whose rows are advanced.
        """
        rows = batch.states
        assert rows is not None
        state = rows.layers[layer]
        qkv, z = gemm(normed, self.in_qkvz.weight).split(self.widths, dim=-1)
        gates = narrow_gemm(normed, self.in_ba.weight)
        norm = z, self.norm, self.eps
        if rows.inputs:
            inputs = rows.inputs[layer]
            qkv = pending_conv(qkv, self.conv, state["conv"], rows, inputs["qkv"])
            return delta_step(qkv, gates, self.A_log, self.dt_bias, state["delta"], rows, *norm, inputs["gates"])
        if batch.block_tables is not None:
            qkv = causal_conv(qkv, self.conv, state["conv"], rows)
            return delta_step(qkv, gates, self.A_log, self.dt_bias, state["delta"], rows, *norm)
        assert batch.cu_seqlens_q is not None
        qkv = causal_conv(qkv, self.conv, state["conv"], rows, batch.cu_seqlens_q)
        out = delta_chunks(qkv, gates, self.A_log, self.dt_bias, state["delta"], rows, batch.cu_seqlens_q)
        return gated_norm(out, z, self.norm, self.eps)


@op(cuda="models.layers.kernels.gated_delta:causal_conv")
def causal_conv(x: Tensor, weight: Tensor, state: Tensor, rows: StateRows, cu_seqlens: Tensor | None = None) -> Tensor:
    """silu(sum over j of weight[:, j] * x[t - 3 + j]) along each sequence, which its row of the state precedes.

    x [n, C], any row stride; weight [C, 4]; state [rows, 3, C], advanced. cu_seqlens int32 [sequences + 1]: bounds of
    the sequences; None: each row is one. Returns [n, C]; rows behind the last sequence are zero.
    """
    tokens, sequences, device = x.shape[0], rows.read.shape[0], x.device
    if cu_seqlens is None:
        cu_seqlens = torch.arange(tokens + 1, dtype=torch.int32, device=device)
    inputs = torch.cat((_read(state, rows.read).flatten(0, 1), x))
    before = CONV_WIDTH - 1

    def inputs_at(sequence: Tensor, index: Tensor) -> Tensor:
        """Rows of sequences; those of the state have negative indices."""
        own = before * sequences + cu_seqlens[sequence] + index
        places = torch.where(index < 0, before * (sequence + 1) + index, own)
        return inputs[places.clamp(max=inputs.shape[0] - 1)]

    segment, index, inside = row_segments(cu_seqlens, tokens)
    taps = torch.arange(-before, 1, device=device)
    windows = inputs_at(segment.clamp(max=sequences - 1)[:, None], index[:, None] + taps)
    mixed = F.silu((upcast(windows) * upcast(weight.T)).sum(1))
    every = torch.arange(sequences, device=device)[:, None]
    state.index_copy_(0, rows.write, inputs_at(every, cu_seqlens.diff()[:, None] + taps[:-1]))
    if rows.snapshot_rows is not None and rows.snapshot_ends is not None:
        state.index_copy_(0, rows.snapshot_rows, inputs_at(every, rows.snapshot_ends[:, None] + taps[:-1]))
    return torch.where(inside[:, None], mixed, 0.0).to(x.dtype)


@op(cuda="models.layers.kernels.gated_delta:pending_conv")
def pending_conv(x: Tensor, weight: Tensor, state: Tensor, rows: StateRows, inputs: Tensor) -> Tensor:
    """causal_conv of each sequence's pending tokens and the tokens behind them, which take their place in `inputs`.

    x [sequences * n, C], any row stride; state [rows, 3, C], which gets the last inputs before x's; inputs [slots + 1,
    T, C], T >= n. Returns [sequences * (T + n), C]: for each sequence T rows, of which the first `pending` are defined,
    and then those of x.
    """
    assert rows.slots is not None and rows.pending is not None
    sequences, held = rows.read.shape[0], inputs.shape[1]
    own = x.unflatten(0, (sequences, -1))
    tokens = torch.cat((_read(state, rows.read), inputs.index_select(0, rows.slots), own), dim=1)
    pending = rows.pending[:, None]
    index = torch.arange(held + own.shape[1], device=x.device)
    place = torch.where(index < held, index, index - held + pending)
    taps = torch.arange(1 - CONV_WIDTH, 1, device=x.device)
    every = torch.arange(sequences, device=x.device)[:, None]

    def inputs_at(index: Tensor) -> Tensor:
        """By numbers that count from the first pending token: [sequences, n] -> [sequences, n, C]."""
        places = torch.where(index < pending, index, index - pending + held) + CONV_WIDTH - 1
        return tokens[every, places.clamp(max=tokens.shape[1] - 1)]

    windows = inputs_at((place[..., None] + taps).flatten(1)).view(-1, CONV_WIDTH, x.shape[1])
    state.index_copy_(0, rows.write, inputs_at(pending + taps[:-1]))
    inputs[:, : own.shape[1]].index_copy_(0, rows.slots, own)
    return F.silu((upcast(windows) * upcast(weight.T)).sum(1)).to(x.dtype)


@op(cuda="models.layers.kernels.gated_delta:delta_step")
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
    """One token of each sequence, then gated_norm.

    qkv [n, C] behind the convolution and gates [n, 2 * value_heads], b before a, contiguous; A_log and dt_bias float32
    [value_heads]; state float32 [rows, value_heads, dk, dv], advanced; z [n, value_heads * dv], any row stride -> like
    z.

    inputs [slots + 1, T, 2 * value_heads], the gates of pending tokens: the state is advanced by these alone, and n /
    sequences tokens of each sequence follow, whose gates take their place. qkv is then what pending_conv returns.
    """
    sequences = rows.read.shape[0]
    held_tokens = 0
    if inputs is not None:
        assert rows.slots is not None
        held_tokens = inputs.shape[1]
        own = gates.unflatten(0, (sequences, -1))
        gates = torch.cat((inputs.index_select(0, rows.slots), own), dim=1).flatten(0, 1)
        inputs[:, : own.shape[1]].index_copy_(0, rows.slots, own)
    by_token = (x.unflatten(0, (sequences, -1)).unbind(1) for x in _inputs(qkv, gates, A_log, dt_bias, state))
    held, outputs = _read(state, rows.read).to(upcast(qkv).dtype), []
    for token, (q, k, v, beta, decay) in enumerate(zip(*by_token, strict=True)):
        if inputs is not None and token == held_tokens:
            state.index_copy_(0, rows.write, held.to(state.dtype))
        faded = held * decay.exp()[..., None, None]
        error = beta[..., None] * (v - torch.einsum("nhkv,nhk->nhv", faded, k))
        after = faded + k[..., :, None] * error[..., None, :]
        if token < held_tokens:
            assert rows.pending is not None
            held = torch.where((token < rows.pending)[:, None, None, None], after, held)
        else:
            held = after
            outputs.append(torch.einsum("nhkv,nhk->nhv", held, q))
    if inputs is None:
        state.index_copy_(0, rows.write, held.to(state.dtype))
    return gated_norm(torch.stack(outputs, dim=1).flatten(0, 1), z, norm_weight, eps)


@op(cuda="models.layers.kernels.gated_delta:delta_chunks")
def delta_chunks(
    qkv: Tensor, gates: Tensor, A_log: Tensor, dt_bias: Tensor, state: Tensor, rows: StateRows, cu_seqlens: Tensor
) -> Tensor:
    """All tokens of the sequences between the bounds cu_seqlens int32 [sequences + 1], in chunks of 64.

    Arguments as of delta_step. Returns [n, value_heads, dv] in qkv's dtype; rows behind the last sequence are zero.
    """
    tokens, sequences = qkv.shape[0], rows.read.shape[0]
    lengths = cu_seqlens.diff()
    counts = (lengths + CHUNK - 1) // CHUNK
    ends = counts.cumsum(0)
    chunk = torch.arange(tokens // CHUNK + sequences, device=qkv.device)
    owner = torch.searchsorted(ends, chunk, right=True)  # `sequences` for the chunks that are not needed
    known = owner.clamp(max=sequences - 1)
    number = chunk - (ends - counts)[known]
    offset = number[:, None] * CHUNK + torch.arange(CHUNK, device=qkv.device)
    inside = (owner < sequences)[:, None] & (offset < lengths[known, None])
    places = torch.where(inside, cu_seqlens[known, None] + offset, tokens)

    def by_chunk(x: Tensor) -> Tensor:
        """[tokens, heads, ...] -> [chunks, heads, 64, ...], zeros where a chunk has no token."""
        return torch.cat((x, torch.zeros_like(x[:1])))[places].transpose(1, 2)

    q, k, v, beta, decay = (by_chunk(x) for x in _inputs(qkv, gates, A_log, dt_bias, state))
    total = decay.cumsum(-1)
    # exp(-total) overflows: subtract first.
    gap = (total[..., :, None] - total[..., None, :]).tril()
    fading = gap.exp().tril()
    triangle = (beta[..., None] * (k @ k.mT) * fading).tril(-1)
    sides = torch.cat((beta[..., None] * v, (beta * total.exp())[..., None] * k), dim=-1)
    solved = torch.linalg.solve_triangular(triangle, sides, upper=False, unitriangular=True)
    corrected, reading = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    from_state, from_chunk = total.exp()[..., None] * q, (q @ k.mT) * fading
    last = total[..., -1:]
    writing, kept = ((last - total).exp()[..., None] * k).mT, last.exp()[..., None]

    held = torch.cat((_read(state, rows.read).to(q.dtype), q.new_zeros(1, *state.shape[1:])))
    snapshots, out = torch.zeros_like(held), torch.zeros_like(corrected)
    limits = torch.zeros_like(lengths) if rows.snapshot_ends is None else rows.snapshot_ends
    taken = (number + 1) * CHUNK == limits[known]
    for i in range(chunk.shape[0]):
        own = owner[i : i + 1]
        before = held.index_select(0, own)[0]
        values = corrected[i] - reading[i] @ before
        out[i] = from_state[i] @ before + from_chunk[i] @ values
        after = (kept[i] * before + writing[i] @ values)[None]
        held.index_copy_(0, own, after)
        snapshots.index_copy_(0, own, torch.where(taken[i], after, snapshots.index_select(0, own)))
    state.index_copy_(0, rows.write, held[:-1].to(state.dtype))
    if rows.snapshot_rows is not None:
        state.index_copy_(0, rows.snapshot_rows, snapshots[:-1].to(state.dtype))
    by_token = out.new_zeros(tokens + 1, out.shape[1], out.shape[3])
    return by_token.index_copy_(0, places.flatten(), out.transpose(1, 2).flatten(0, 1))[:-1].to(qkv.dtype)


@op(cuda="models.layers.kernels.gated_delta:gated_norm")
def gated_norm(x: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of each head times silu(z), rounded once: x [n, heads, dv], z [n, heads * dv], any row stride; weight
    float32 [dv] -> like z."""
    values = upcast(x)
    normed = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + eps) * weight
    return (normed.flatten(-2) * F.silu(upcast(z))).to(z.dtype)


def _read(state: Tensor, rows: Tensor) -> Tensor:
    """Rows of a state; row 0 reads as zeros."""
    return torch.where((rows == 0).view(-1, *[1] * (state.dim() - 1)), 0.0, state.index_select(0, rows))


def _inputs(
    qkv: Tensor, gates: Tensor, A_log: Tensor, dt_bias: Tensor, state: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Unit queries (times 1 / sqrt(dk)) and keys [n, value_heads, dk], values [n, value_heads, dv], beta and the
    logarithm of the decay [n, value_heads], in float32."""
    value_heads, key_dim, value_dim = state.shape[1:]
    values = value_heads * value_dim
    key_heads = (qkv.shape[1] - values) // (2 * key_dim)
    q, k, v = upcast(qkv).split((key_heads * key_dim, key_heads * key_dim, values), dim=-1)

    def unit(x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (key_heads, key_dim))
        heads = heads * torch.rsqrt(heads.square().sum(-1, keepdim=True) + UNIT_EPS)
        return heads.repeat_interleave(value_heads // key_heads, dim=1)

    b, a = upcast(gates).chunk(2, dim=-1)
    decay = -A_log.exp() * F.softplus(a + dt_bias)
    return unit(q) * key_dim**-0.5, unit(k), v.unflatten(-1, (value_heads, value_dim)), torch.sigmoid(b), decay
