"""What the language model is trained by: the flow of the next patch, the stop, and helpers that are dropped later."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.embedded.voices.flite import PHONES
from models.embedded.voices.latents import FRAMES, LATENT_DIM
from models.embedded.voices.network import Network, Times, solver_times
from models.embedded.voices.packing import Batch, Store

GUIDED = {1: 2, 2: 2, 3: 2}
"""Layers of the TSLM whose first heads are shown where to look, and how many of them."""


class Helpers(nn.Module):
    """Heads on the flow's condition that say which phones come next and what the next patch is on average."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width = 2 * config["dit_config"]["hidden_dim"]
        self.inner = nn.Linear(width, width)
        self.phones = nn.Linear(width, FRAMES * len(PHONES))
        self.mean = nn.Linear(width, FRAMES * LATENT_DIM)

    def forward(self, mu: Tensor) -> tuple[Tensor, Tensor]:
        """mu [n, 2, h] -> logits [n, P, phones], patches [n, P, D]."""
        hidden = F.silu(self.inner(mu.flatten(1)))
        return self.phones(hidden).unflatten(1, (FRAMES, -1)), self.mean(hidden).unflatten(1, (FRAMES, -1))


@dataclass(frozen=True)
class Weights:
    flow: float = 1.0
    stop: float = 0.1
    phones: float = 0.2
    mean: float = 0.3
    guidance: float = 0.3


class Objective(nn.Module):
    """Network, helpers and their losses. draws: noises a target; drop: share of targets without a condition, which
    the guidance of the solver needs."""

    def __init__(self, network: Network, draws: int = 3, drop: float = 0.1) -> None:
        super().__init__()
        self.network = network
        self.helpers = Helpers(network.config)
        self.draws, self.drop = draws, drop
        times = solver_times(network.config["dit_config"]["hidden_dim"], torch.device("cpu"))
        for name, value in zip(Times._fields, times, strict=True):
            self.register_buffer(f"times_{name}", value, persistent=False)

    def forward(self, batch: Batch, store: Store, weights: Weights) -> tuple[Tensor, dict[str, Tensor]]:
        """-> the loss, and its parts for people."""
        network, device = self.network, store.latents.device
        rows, length = batch.token_ids.shape
        clean = store.latents.view(-1, FRAMES, LATENT_DIM)
        past = clean[batch.audio_patch].float()
        past = past + batch.audio_noise[:, None, None] * torch.randn_like(past)
        embeds = network.embed_patches(past)
        flat = torch.zeros(rows * length + 1, embeds.shape[1], dtype=embeds.dtype, device=device)
        flat = flat.index_copy(0, batch.audio_place, embeds)[:-1].view(rows, length, -1)
        mask = causal_mask(batch.documents)
        guided = GUIDED if weights.guidance else {}
        hidden, residual, logits = network.backbone(
            batch.token_ids, batch.is_patch, flat, batch.positions, mask, guided
        )
        lm, res = (x.flatten(0, 1).index_select(0, batch.place) for x in (hidden, residual))
        mu, target, weight = network.condition(lm, res), clean[batch.patch].float(), batch.weight
        total = weight.sum()
        stop = F.cross_entropy(network.stop_logits(lm).float(), batch.last, reduction="none")
        phones, mean = self.helpers(mu)
        spoken = store.phones.view(-1, FRAMES)[batch.patch].long()
        heard = F.cross_entropy(phones.float().transpose(1, 2), spoken, reduction="none").mean(1)
        missed = (mean.float() - target).square().mean((1, 2))
        before = past[batch.before] * (batch.before < len(past) - 1)[:, None, None]
        parts = {
            "flow": (self._flow(mu, target, before) * weight).sum() / total,
            "stop": (stop * weight).sum() / total,
            "phones": (heard * weight).sum() / total,
            "mean": (missed * weight).sum() / total,
        }
        if guided:
            parts["guidance"] = (self._guidance(batch, logits) * weight).sum() / total
        loss = sum((getattr(weights, name) * part for name, part in parts.items()), torch.zeros((), device=device))
        parts["accuracy"] = ((phones.argmax(-1) == spoken).float().mean(1) * weight).sum() / total
        return loss, parts

    def _flow(self, mu: Tensor, target: Tensor, before: Tensor) -> Tensor:
        """-> squared error of the velocity of each target [n], over all draws."""
        count, device, estimator = len(target), target.device, self.network.feat_decoder.estimator
        times = Times(*(getattr(self, f"times_{name}") for name in Times._fields))
        drawn = torch.multinomial(times.weight, self.draws * count, replacement=True)
        embedded = estimator.time_embedding(times.waves, times.still).index_select(0, drawn)
        kept = (torch.rand(count, 1, 1, device=device) >= self.drop).repeat(self.draws, 1, 1)
        mu, target, before = (x.repeat(self.draws, 1, 1) for x in (mu, target, before))
        noise, part = torch.randn_like(target), times.noise[drawn][:, None, None]
        noisy = target + part * (noise - target)
        wanted = (noisy - target) / times.time[drawn][:, None, None]
        velocity = self.network.velocity(noisy, mu * kept, embedded, before)
        return (velocity.float() - wanted).square().mean((1, 2)).view(self.draws, count).mean(0)

    def _guidance(self, batch: Batch, logits: list[Tensor]) -> Tensor:
        """-> minus the logarithm of the share of attention that falls on the characters being spoken [n]."""
        length = batch.token_ids.shape[1]
        row, column = batch.place // length, batch.place % length
        keys = torch.arange(length, device=row.device)
        own = batch.documents[row] == batch.documents[row, column][:, None]
        allowed = own & (keys <= column[:, None])
        wanted = (keys >= batch.span[:, :1]) & (keys < batch.span[:, 1:]) & allowed
        total = torch.zeros(len(row), device=row.device)
        for values in logits:
            chosen = values[row, :, column]
            everything = chosen.masked_fill(~allowed[:, None], -1e4).logsumexp(-1)
            inside = chosen.masked_fill(~wanted[:, None], -1e4).logsumexp(-1)
            total = total + (everything - inside).clamp(max=20.0).mean(1)
        return total / len(logits)


def causal_mask(documents: Tensor) -> Tensor:
    """documents [B, T] -> bool [B, 1, T, T]: one's own document, up to oneself."""
    length = documents.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=documents.device).tril()
    return ((documents[:, :, None] == documents[:, None, :]) & causal)[:, None]
