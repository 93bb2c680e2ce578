"""The tiny chat family with a recurrent layer before its decoder: a sum that hardly decays, so that a token which was
added twice, not at all or by another sequence shows in every later token."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from models.interfaces.capturable import BufferSpec
from models.layers.decoder import CausalDecoder
from models.layers.kv_cache import STATE_INTERVAL, PagedBatch, StateRows
from tests.support.tiny_chat import WIDTH, TinyChat, tiny_model


class RecurrentDecoder(nn.Module):
    """state[t] = decay * state[t - 1] + tanh(a * x[t] + b * x[t - 1]), added to the embedding x[t].

    Chunks are computed in blocks of STATE_INTERVAL rows, so other cuts round differently. Row 0 is full of NaN.
    """

    drafter = None
    decay: Tensor
    powers: Tensor
    carried: Tensor

    def __init__(self, inner: CausalDecoder) -> None:
        super().__init__()
        self.inner = inner
        for name in ("vocab_size", "hidden_size", "max_positions", "position_axes", "feature_levels"):
            setattr(self, name, getattr(inner, name))
        generator = torch.Generator().manual_seed(3)
        weights = torch.randn(2, WIDTH, generator=generator)
        self.now, self.before = (nn.Parameter(weight, requires_grad=False) for weight in weights)
        decay = 1 - 0.5 ** torch.linspace(2, 9, WIDTH)
        places = torch.arange(STATE_INTERVAL)
        distance = places[:, None] - places
        self.register_buffer("decay", decay)
        self.register_buffer("powers", (decay ** distance.clamp(min=0)[..., None]) * (distance >= 0)[..., None])
        self.register_buffer("carried", decay ** (places[:, None] + 1))

    def cache_specs(self) -> Any:
        return self.inner.cache_specs()

    def state_specs(self) -> list[Mapping[str, BufferSpec]]:
        return [{"sum": BufferSpec((WIDTH,), torch.float32), "last": BufferSpec((WIDTH,), self.now.dtype)}]

    def pending_specs(self, tokens: int) -> list[Mapping[str, BufferSpec]]:
        return [{"x": BufferSpec((tokens, WIDTH), self.now.dtype)}]

    def embed(self, token_ids: Tensor) -> Tensor:
        return self.inner.embed(token_ids)

    def logits(self, hidden: Tensor) -> Tensor:
        return self.inner.logits(hidden)

    def forward(self, hidden: Tensor, positions: Tensor, batch: PagedBatch) -> Tensor:
        assert batch.states is not None
        rows = self._chunks if batch.block_tables is None else self._decode
        if batch.states.pending is not None:
            rows = self._with_pending
        return self.inner(hidden + 0.2 * rows(hidden, batch.states, batch), positions, batch)

    def _decode(self, x: Tensor, states: StateRows, batch: PagedBatch) -> Tensor:
        (layer,) = states.layers
        known = (states.read > 0)[:, None]
        last = torch.where(known, layer["last"][states.read], 0)
        total = torch.where(known, layer["sum"][states.read], 0) * self.decay + self._added(x, last)
        self._write(layer, states.write, total, x)
        return total

    def _with_pending(self, x: Tensor, states: StateRows, batch: PagedBatch) -> Tensor:
        (layer,), (inputs,) = states.layers, states.inputs
        assert states.slots is not None and states.pending is not None
        known = (states.read > 0)[:, None]
        total, last = (torch.where(known, layer[name][states.read], 0) for name in ("sum", "last"))
        for place, row in enumerate(inputs["x"][states.slots].unbind(1)):
            accepted = (place < states.pending)[:, None]
            total = torch.where(accepted, total * self.decay + self._added(row, last), total)
            last = torch.where(accepted, row, last)
        self._write(layer, states.write, total, last)
        own = x.unflatten(0, (len(states.read), -1))
        inputs["x"][states.slots, : own.shape[1]] = own
        inputs["x"][0] = torch.nan
        totals = []
        for row in own.unbind(1):
            total, last = total * self.decay + self._added(row, last), row
            totals.append(total)
        return torch.stack(totals, dim=1).flatten(0, 1)

    def _chunks(self, x: Tensor, states: StateRows, batch: PagedBatch) -> Tensor:
        (layer,) = states.layers
        assert batch.cu_seqlens_q is not None and states.snapshot_rows is not None and states.snapshot_ends is not None
        out = torch.zeros_like(x)
        places = torch.stack((states.read, states.write, states.snapshot_rows, states.snapshot_ends), dim=1).tolist()
        for (start, end), place in zip(pairwise(batch.cu_seqlens_q.tolist()), places, strict=True):
            read, write, snapshot, snapshot_end = place
            total, last = (layer[name][read].clone() if read else torch.zeros(WIDTH) for name in ("sum", "last"))
            for first in range(start, end, STATE_INTERVAL):
                block = x[first : min(end, first + STATE_INTERVAL)]
                added = torch.zeros(STATE_INTERVAL, WIDTH)
                added[: len(block)] = self._added(block, torch.cat((last[None], block[:-1])))
                totals = torch.einsum("ijc,jc->ic", self.powers, added) + self.carried * total
                out[first : first + len(block)] = totals[: len(block)]
                total, last = totals[len(block) - 1], block[-1]
                if first + len(block) - start == snapshot_end and snapshot:
                    self._write(layer, torch.tensor([snapshot]), total[None], last[None])
            if end > start:
                self._write(layer, torch.tensor([write]), total[None], last[None])
        return out

    def _added(self, x: Tensor, last: Tensor) -> Tensor:
        return torch.tanh(self.now * x + self.before * last)

    def _write(self, layer: Mapping[str, Tensor], rows: Tensor, total: Tensor, last: Tensor) -> None:
        layer["sum"][rows], layer["last"][rows] = total, last
        layer["sum"][0], layer["last"][0] = torch.nan, torch.nan


def recurrent_model() -> TinyChat:
    """On a CPU, in float32."""
    model = tiny_model()
    return TinyChat(model.encoder, RecurrentDecoder(model.decoder))  # type: ignore[arg-type]
