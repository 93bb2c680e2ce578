"""Convolution and delta rule with their state, against the recurrence token by token in float64."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from models.layers.gated_delta import GatedDeltaConfig, causal_conv, delta_chunks, delta_step, gated_norm, pending_conv
from models.layers.kv_cache import StateRows
from tests.models.kernels.checking import relative_error

CONFIG = GatedDeltaConfig(hidden_size=8, key_heads=2, value_heads=4, key_dim=16, value_dim=32, norm_eps=1e-6)
EPS = CONFIG.norm_eps


class Layer(NamedTuple):
    """Inputs of some tokens, parameters, and states whose scratch row holds NaN."""

    x: Tensor
    gates: Tensor
    z: Tensor
    conv: Tensor
    A_log: Tensor
    dt_bias: Tensor
    norm: Tensor
    states: dict[str, Tensor]

    def prefill(self, bounds: list[int], read: list[int], write: list[int], **options: list[int]) -> Tensor:
        """The rows in front of bounds[-1], and all others, which hold rubbish."""
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32)
        rows = self.rows(read, write, **options)
        x = torch.where((torch.arange(len(self.x)) < bounds[-1])[:, None], self.x, torch.nan)
        qkv = causal_conv(x, self.conv, self.states["conv"], rows, cu_seqlens)
        return delta_chunks(qkv, self.gates, self.A_log, self.dt_bias, self.states["delta"], rows, cu_seqlens)

    def step(self, read: list[int], write: list[int]) -> Tensor:
        rows = self.rows(read, write)
        qkv = causal_conv(self.x, self.conv, self.states["conv"], rows)
        delta = self.states["delta"]
        return delta_step(qkv, self.gates, self.A_log, self.dt_bias, delta, rows, self.z, self.norm, EPS)

    def step_with_drafts(self, rows: StateRows) -> Tensor:
        (inputs,), delta = rows.inputs, self.states["delta"]
        qkv = pending_conv(self.x, self.conv, self.states["conv"], rows, inputs["qkv"])
        given = (qkv, self.gates, self.A_log, self.dt_bias, delta, rows, self.z, self.norm, EPS)
        return delta_step(*given, inputs["gates"])

    def rows(
        self, read: list[int], write: list[int], snapshot_rows: list[int] | None = None, ends: list[int] | None = None
    ) -> StateRows:
        layers = [self.states]
        return StateRows(layers, torch.tensor(read), torch.tensor(write), ints(snapshot_rows), ints(ends))

    def tokens(self, first: int, end: int) -> Layer:
        return self._replace(x=self.x[first:end], gates=self.gates[first:end], z=self.z[first:end])


def ints(values: list[int] | None) -> Tensor | None:
    return None if values is None else torch.tensor(values)


def make(tokens: int, rows: int = 8, config: GatedDeltaConfig = CONFIG, dtype: torch.dtype = torch.float32) -> Layer:
    heads, inner = config.value_heads, config.value_heads * config.value_dim
    states = {
        name: torch.full((rows, *spec.shape), torch.nan, dtype=spec.dtype)
        for name, spec in config.state_spec(dtype).items()
    }
    # Heads that remember hundreds of tokens, and heads that forget at once.
    return Layer(
        torch.randn(tokens, config.channels).to(dtype),
        torch.randn(tokens, 2 * heads).to(dtype),
        torch.randn(tokens, inner).to(dtype),
        (torch.randn(config.channels, 4) / 2).to(dtype),
        torch.linspace(-6.0, 2.7, heads),
        torch.randn(heads),
        torch.randn(config.value_dim),
        states,
    )


def recurrence(layer: Layer) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs before the norm, and both states after the last token of one sequence, in float64."""
    x, gates, conv, A_log, dt_bias = (
        t.double() for t in (layer.x, layer.gates, layer.conv, layer.A_log, layer.dt_bias)
    )
    padded = F.pad(x, (0, 0, 3, 0))
    key_width = CONFIG.key_heads * CONFIG.key_dim
    state = torch.zeros(CONFIG.value_heads, CONFIG.key_dim, CONFIG.value_dim, dtype=torch.float64)
    outputs = []
    for t in range(len(x)):
        mixed = F.silu((padded[t : t + 4] * conv.T).sum(0))
        q, k, v = mixed.split((key_width, key_width, CONFIG.value_heads * CONFIG.value_dim))
        q, k = (y.view(CONFIG.key_heads, -1) for y in (q, k))
        q, k = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, k))
        b, a = gates[t].chunk(2)
        for head in range(CONFIG.value_heads):
            key, query = k[head // 2], q[head // 2] / CONFIG.key_dim**0.5
            value = v.view(CONFIG.value_heads, -1)[head]
            S = state[head] * torch.exp(-A_log[head].exp() * F.softplus(a[head] + dt_bias[head]))
            S = S + torch.outer(key, torch.sigmoid(b[head]) * (value - S.T @ key))
            state[head] = S
            outputs.append(S.T @ query)
    return torch.stack(outputs).view(len(x), CONFIG.value_heads, -1), padded[-3:], state


@pytest.mark.parametrize("tokens", [1, 2, 63, 64, 65, 200])
def test_a_prompt_equals_the_recurrence(tokens: int) -> None:
    layer = make(tokens)
    expected, conv, delta = recurrence(layer)
    torch.testing.assert_close(layer.prefill([0, tokens], [0], [3]).double(), expected, rtol=0, atol=2e-6)
    torch.testing.assert_close(layer.states["conv"][3].double(), conv, rtol=0, atol=0)
    torch.testing.assert_close(layer.states["delta"][3].double(), delta, rtol=0, atol=2e-6)


def test_steps_equal_the_recurrence() -> None:
    """From a prompt of one token on, in place, beside padded rows and from row to row."""
    tokens = 6
    layer = make(tokens)
    expected, conv, delta = recurrence(layer)
    layer.tokens(0, 1).prefill([0, 1], [0], [3])
    for t in range(1, tokens):
        read, write = (3, 3) if t % 2 else (3, 5)
        if not t % 2:
            layer.states["conv"][5], layer.states["delta"][5] = torch.nan, torch.nan
        padded = layer._replace(x=layer.x[t].expand(3, -1), gates=layer.gates[[t, 0, 0]], z=layer.z[[t, 0, 0]])
        out = padded.step([read, 0, 0], [write, 0, 0])
        assert out.isfinite().all()
        normed = gated_norm(expected[t][None], layer.z[t][None].double(), layer.norm.double(), EPS)
        torch.testing.assert_close(out[:1].double(), normed, rtol=0, atol=1e-4)
        if write != 3:
            for state in layer.states.values():
                state[3] = state[write]
    torch.testing.assert_close(layer.states["conv"][3].double(), conv, rtol=0, atol=0)
    torch.testing.assert_close(layer.states["delta"][3].double(), delta, rtol=0, atol=2e-6)


def test_rejected_drafts_leave_no_trace(of_states: float = 1e-6, of_outputs: float = 1e-5) -> None:
    """Steps of one token to three, of which some are rejected, compute what steps of one token do: outputs, and the
    state before the pending tokens. A padded row holds rubbish."""
    sequences, accepted = 2, [(3, 1), (1, 1), (2, 3), (1, 2), (1, 1)]
    steps = 1 + max(sum(counts) for counts in zip(*accepted, strict=True))
    layer = make(steps * sequences)
    plain = layer._replace(states={name: state.clone() for name, state in layer.states.items()})
    by_step = [layer.tokens(sequences * step, sequences * (step + 1)) for step in range(steps)]
    expected, states = [], []
    for step, tokens in enumerate(by_step):
        states.append({name: state[:4].clone() for name, state in plain.states.items()})
        read = [2, 3] if step else [0, 0]
        expected.append(plain._replace(x=tokens.x, gates=tokens.gates, z=tokens.z).step(read, [2, 3]))
    inputs = {
        name: torch.full((sequences + 1, *spec.shape), torch.nan)
        for name, spec in CONFIG.pending_spec(3, torch.float32).items()
    }
    known, counts = [0, 0], (0, 0)
    for number, following in enumerate(accepted):
        length = max(following)
        drafts = make(length * (sequences + 1))
        for row, count in enumerate(following):
            for token in range(count):
                place = row * length + token
                for name in ("x", "gates", "z"):
                    getattr(drafts, name)[place] = getattr(by_step[known[row] + token], name)[row]
        read, write = ([2, 3, 0], [2, 3, 0]) if number else ([0, 0, 0], [2, 3, 0])
        rows = layer.rows(read, write)
        pending = torch.tensor([*counts, 0])
        rows = replace(rows, inputs=[inputs], slots=torch.tensor([1, 2, 0]), pending=pending)
        out = drafts._replace(
            states=layer.states, conv=layer.conv, A_log=layer.A_log, dt_bias=layer.dt_bias, norm=layer.norm
        ).step_with_drafts(rows)
        assert out.isfinite().all()
        for row, count in enumerate(following):
            if known[row]:
                for name, state in layer.states.items():
                    error = relative_error(state[2 + row], states[known[row]][name][2 + row])
                    assert error <= of_states, (number, row, name)
            for token in range(count):
                assert relative_error(out[row * length + token], expected[known[row] + token][row]) <= of_outputs
            known[row] += count
        counts = following


@pytest.mark.parametrize("cut", [2, 64, 100, 128, 192])
def test_cuts_at_multiples_of_64_change_no_bit(cut: int) -> None:
    """In one launch or two, alone or beside others, with a snapshot on the way. Other cuts are right up to rounding."""
    tokens = 200
    layer = make(tokens)
    whole = layer.prefill([0, tokens, tokens], [0, 0], [3, 0], snapshot_rows=[4, 0], ends=[128, 0])
    first = layer.tokens(0, cut).prefill([0, cut], [0], [5])
    second = layer.tokens(cut, tokens).prefill([0, tokens - cut], [5], [6])
    pairs = [(torch.cat((first, second)), whole), *((state[6], state[3]) for state in layer.states.values())]
    for found, expected in pairs:
        assert torch.equal(found, expected) or (cut % 64 and relative_error(found, expected) < 1e-6)
    if cut == 128:
        assert all(torch.equal(state[5], state[4]) for state in layer.states.values())


def test_sequences_leave_each_other_alone() -> None:
    """Packed sequences of any lengths, one of them empty, with padding behind them, get the states and outputs that
    they get alone."""
    lengths = [70, 0, 1, 129, 3]
    bounds = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    layer = make(bounds[-1] + 20, rows=20)
    for row in (11, 12):
        layer.tokens(0, 9).prefill([0, 9], [0], [row])
    read, write = [11, 11, 12, 0, 12], [1, 2, 3, 4, 5]
    before = {name: state.clone() for name, state in layer.states.items()}
    together = layer.prefill([*bounds, bounds[-1]], [*read, 0], [*write, 0], snapshot_rows=[6, 0, 0, 7, 0, 0],
                             ends=[64, 0, 0, 128, 0, 0])  # fmt: skip
    assert not together[bounds[-1] :].any()
    for i, (first, end) in enumerate(pairwise(bounds)):
        alone = layer._replace(states={name: state.clone() for name, state in before.items()}).tokens(first, end)
        if first == end:
            assert all(torch.equal(state[write[i]], state[read[i]]) for state in layer.states.values())
            continue
        assert torch.equal(alone.prefill([0, end - first], [read[i]], [write[i]]), together[first:end])
        for name, state in layer.states.items():
            assert torch.equal(state[write[i]], alone.states[name][write[i]])
