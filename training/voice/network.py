"""VoxCPM2's networks as they are trained: whole sequences at once, gradients, published parameter names; and the
losses: the flow of the next patch, the stop, and auxiliary heads that are dropped later.

What the server computes step by step over a cache (models/voxcpm2/network.py) is computed here for every position of
packed rows; a test holds the two equal. P latent frames of D values make a patch [P, D].
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.voxcpm2.config import SOLVER_STEPS
from models.voxcpm2.solver import schedule, sinusoid
from training.transformer import Block, Parts, RMSNorm, Rotary, rotary_of
from training.voice.config import CONFIG
from training.voice.corpus import Store
from training.voice.flite import PHONES
from training.voice.latents import FRAMES, LATENT_DIM
from training.voice.packing import Batch

_LM, _ENCODER, _DIT = (CONFIG[f"{name}_config"] for name in ("lm", "encoder", "dit"))


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, heads: int) -> tuple[Tensor, Tensor | None]:
    """q, k, v [N, T, heads, head_dim]; mask bool [N, 1, T, T] or None for all to all. heads: of how many, from the
    first on, the logits [N, heads, T, T] float32 are returned, too."""
    q, k, v = (y.transpose(1, 2) for y in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
    if not heads:
        return out, None
    return out, (q[:, :heads] @ k[:, :heads].transpose(2, 3)).float() / math.sqrt(q.shape[-1])


class Stack(nn.Module):
    """part: lm_config, encoder_config or dit_config."""

    def __init__(self, part: dict[str, Any], layers: int) -> None:
        super().__init__()
        width, inner = part.get("hidden_dim") or part["hidden_size"], part.get("ffn_dim") or part["intermediate_size"]
        heads = part.get("num_heads") or part["num_attention_heads"]
        shape, eps = (width, inner, heads, _LM["num_key_value_heads"], part["kv_channels"]), _LM["rms_norm_eps"]
        self.layers = nn.ModuleList(Block(*shape, eps=eps) for _ in range(layers))
        self.norm = RMSNorm(width, eps)
        for block in self.layers:
            for out in (block.self_attn.o_proj, block.mlp.down_proj):  # type: ignore[union-attr]
                out.weight.data.mul_((2 * layers) ** -0.5)  # type: ignore[union-attr, operator]

    def forward(
        self, x: Tensor, rotary: Rotary | None, mask: Tensor | None, guided: dict[int, int] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """guided: layer -> number of heads whose logits are returned."""
        all_logits = []
        for index, block in enumerate(self.layers):
            x, logits = block(x, rotary, attend, mask, (guided or {}).get(index, 0))
            if logits is not None:
                all_logits.append(logits)
        return self.norm(x), all_logits


class Times(NamedTuple):
    """What the solvers ask the estimator at: of each evaluation the noise's part s of x = (1 - s) data + s noise, and
    t with velocity (x - data) / t; waves: the sinusoids of t, in the roundings of both dtypes. weight: how often."""

    noise: Tensor
    time: Tensor
    waves: Tensor
    still: Tensor
    weight: Tensor


def solver_times(width: int) -> Times:
    """The first Euler step stands still, so the noise is whole at the first evaluation and s = t / t_first there and
    thereafter, where each step takes x along (x - data) / t."""
    noise, time, waves, weight = [], [], [], []
    for steps in SOLVER_STEPS:
        for dtype in (torch.float32, torch.bfloat16):
            times = schedule(steps, dtype).times
            noise += [t / times[0] for t in times]
            time += list(times)
            waves.append(sinusoid(torch.tensor(times, dtype=dtype), width).float())
            weight += [(0.7 if steps == SOLVER_STEPS[0] else 0.1) / len(times)] * len(times)
    still = sinusoid(torch.zeros(1), width)
    return Times(torch.tensor(noise), torch.tensor(time), torch.cat(waves), still, torch.tensor(weight))


class Auxiliary(nn.Module):
    """Heads on the flow's condition that say which phones come next and what the next patch is on average."""

    def __init__(self) -> None:
        super().__init__()
        width = 2 * _DIT["hidden_dim"]
        self.inner = nn.Linear(width, width)
        self.phones = nn.Linear(width, FRAMES * len(PHONES))
        self.mean = nn.Linear(width, FRAMES * LATENT_DIM)

    def forward(self, mu: Tensor) -> tuple[Tensor, Tensor]:
        """mu [n, 2, h] -> logits [n, P, phones], patches [n, P, D]."""
        hidden = F.silu(self.inner(mu.flatten(1)))
        return self.phones(hidden).unflatten(1, (FRAMES, -1)), self.mean(hidden).unflatten(1, (FRAMES, -1))


class Network(nn.Module):
    """All of model.safetensors, and the auxiliary heads."""

    def __init__(self) -> None:
        super().__init__()
        width, local, dit = _LM["hidden_size"], _ENCODER["hidden_dim"], _DIT["hidden_dim"]
        features, quantised = CONFIG["feat_dim"], CONFIG["scalar_quantization_latent_dim"]
        self.base_lm = Stack(_LM, _LM["num_hidden_layers"])
        self.base_lm.embed_tokens = nn.Embedding(_LM["vocab_size"], width)
        self.residual_lm = Stack(_LM, CONFIG["residual_lm_num_layers"])
        self.feat_encoder = Parts(in_proj=nn.Linear(features, local))
        self.feat_encoder.special_token = nn.Parameter(torch.randn(1, 1, 1, local))
        self.feat_encoder.encoder = Stack(_ENCODER, _ENCODER["num_layers"])
        estimator = Parts(
            in_proj=nn.Linear(features, dit),
            cond_proj=nn.Linear(features, dit),
            out_proj=nn.Linear(dit, features),
            time_mlp=Parts(linear_1=nn.Linear(dit, dit), linear_2=nn.Linear(dit, dit)),
            delta_time_mlp=Parts(linear_1=nn.Linear(dit, dit), linear_2=nn.Linear(dit, dit)),
            decoder=Stack(_DIT, _DIT["num_layers"]),
        )
        self.feat_decoder = Parts(estimator=estimator)
        self.fsq_layer = Parts(in_proj=nn.Linear(width, quantised), out_proj=nn.Linear(quantised, width))
        self.enc_to_lm_proj = nn.Linear(local, width)
        self.lm_to_dit_proj = nn.Linear(width, dit)
        self.res_to_dit_proj = nn.Linear(width, dit)
        self.fusion_concat_proj = nn.Linear(2 * width, width)
        self.stop_proj = nn.Linear(width, width)
        self.stop_head = nn.Linear(width, 2, bias=False)
        self.auxiliary = Auxiliary()
        for name, value in solver_times(dit)._asdict().items():
            self.register_buffer(f"times_{name}", value, persistent=False)

    @property
    def times(self) -> Times:
        return Times(*(getattr(self, f"times_{name}") for name in Times._fields))

    def rotary(self, positions: Tensor) -> Rotary:
        """positions int64 [...] -> for the stacks."""
        return rotary_of(positions[..., None], _LM["kv_channels"] // 2, _LM["rope_theta"])

    def backbone(
        self,
        token_ids: Tensor,
        is_patch: Tensor,
        embeds: Tensor,
        positions: Tensor,
        mask: Tensor,
        guided: dict[int, int] | None = None,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """token_ids, is_patch and positions [B, T]; embeds [B, T, H] of patches, anything elsewhere -> what the server
        calls TSLM after FSQ and RALM, [B, T, H] each, and the logits of the guided heads."""
        audio = is_patch[..., None]
        text = self.base_lm.embed_tokens(token_ids).to(embeds.dtype)  # type: ignore[operator]
        hidden, logits = self.base_lm(torch.where(audio, embeds, text), self.rotary(positions), mask, guided)
        hidden = torch.where(audio, self._quantised(hidden), hidden)
        fused = self.fusion_concat_proj(torch.cat((hidden, torch.where(audio, embeds, 0.0)), dim=-1))
        return hidden, self.residual_lm(fused, None, mask)[0], logits

    def _quantised(self, x: Tensor) -> Tensor:
        """The rounding has the gradient 1."""
        scale, smooth = CONFIG["scalar_quantization_scale"], torch.tanh(self.fsq_layer.in_proj(x).float())
        rounded = smooth + ((smooth * scale).round() / scale - smooth).detach()
        return self.fsq_layer.out_proj(rounded.to(x.dtype))

    def embed_patches(self, patches: Tensor) -> Tensor:
        """[n, P, D] -> [n, H]."""
        tokens = self.feat_encoder.in_proj(patches)
        special = self.feat_encoder.special_token[0].expand(len(patches), -1, -1).to(tokens.dtype)
        x = torch.cat((special, tokens), dim=1)
        hidden, _ = self.feat_encoder.encoder(x, self.rotary(torch.arange(x.shape[1], device=x.device)), None)
        return self.enc_to_lm_proj(hidden[:, 0])

    def condition(self, lm: Tensor, residual: Tensor) -> Tensor:
        """[n, H] each -> mu [n, 2, h]."""
        return torch.stack((self.lm_to_dit_proj(lm), self.res_to_dit_proj(residual)), dim=1)

    def time_embedding(self, waves: Tensor, still: Tensor) -> Tensor:
        """Sinusoids [n, h] of a step's time and of no time -> [n, h]."""
        estimator = self.feat_decoder.estimator
        pairs = (estimator.time_mlp, waves), (estimator.delta_time_mlp, still)
        one, other = (mlp.linear_2(F.silu(mlp.linear_1(x))) for mlp, x in pairs)
        return one + other

    def velocity(self, x: Tensor, mu: Tensor, time: Tensor, previous: Tensor) -> Tensor:
        """x and previous [n, P, D], mu [n, 2, h], time [n, h] -> velocity [n, P, D]."""
        estimator = self.feat_decoder.estimator
        noisy, before = estimator.in_proj(x), estimator.cond_proj(previous)
        tokens = torch.cat((mu.to(noisy.dtype), time[:, None].to(noisy.dtype), before, noisy), dim=1)
        hidden, _ = estimator.decoder(tokens, self.rotary(torch.arange(tokens.shape[1], device=x.device)), None)
        return estimator.out_proj(hidden[:, -x.shape[1] :])

    def stop_logits(self, lm: Tensor) -> Tensor:
        return self.stop_head(F.silu(self.stop_proj(lm)))


GUIDED = {1: 2, 2: 2, 3: 2}
"""Layers of the TSLM whose first heads are shown where to look, and how many of them."""


_WEIGHTS = {"flow": 1.0, "stop": 0.1, "phones": 0.2, "mean": 0.3}
_DRAWS = 3
"""Noises a target."""
_DROP = 0.1
"""Share of targets without a condition, which the guidance of the solver needs."""


def losses(network: Network, batch: Batch, store: Store, guidance: float) -> tuple[Tensor, dict[str, Tensor]]:
    """-> the loss, and its parts for people. guidance: weight of the attention that is shown where to look."""
    device = store.latents.device
    rows, length = batch["token_ids"].shape
    clean = store.latents.view(-1, FRAMES, LATENT_DIM)
    past = clean[batch["audio_patch"]].float()
    past = past + batch["audio_noise"][:, None, None] * torch.randn_like(past)
    embeds = network.embed_patches(past)
    flat = torch.zeros(rows * length + 1, embeds.shape[1], dtype=embeds.dtype, device=device)
    flat = flat.index_copy(0, batch["audio_place"], embeds)[:-1].view(rows, length, -1)
    mask = causal_mask(batch["documents"])
    guided = GUIDED if guidance else {}
    hidden, residual, logits = network.backbone(
        batch["token_ids"], batch["is_patch"], flat, batch["positions"], mask, guided
    )
    lm, res = (x.flatten(0, 1).index_select(0, batch["place"]) for x in (hidden, residual))
    mu, target, weight = network.condition(lm, res), clean[batch["patch"]].float(), batch["weight"]
    total = weight.sum()
    stop = F.cross_entropy(network.stop_logits(lm).float(), batch["last"], reduction="none")
    phones, mean = network.auxiliary(mu)
    spoken = store.phones.view(-1, FRAMES)[batch["patch"]].long()
    heard = F.cross_entropy(phones.float().transpose(1, 2), spoken, reduction="none").mean(1)
    missed = (mean.float() - target).square().mean((1, 2))
    before = past[batch["before"]] * (batch["before"] < len(past) - 1)[:, None, None]
    parts = {
        "flow": (_flow(network, mu, target, before) * weight).sum() / total,
        "stop": (stop * weight).sum() / total,
        "phones": (heard * weight).sum() / total,
        "mean": (missed * weight).sum() / total,
    }
    if guided:
        parts["guidance"] = (_guidance(batch, logits) * weight).sum() / total
    loss = torch.stack([(_WEIGHTS | {"guidance": guidance})[name] * part for name, part in parts.items()]).sum()
    parts["accuracy"] = ((phones.argmax(-1) == spoken).float().mean(1) * weight).sum() / total
    return loss, parts


def _flow(network: Network, mu: Tensor, target: Tensor, before: Tensor) -> Tensor:
    """-> squared error of the velocity of each target [n], over all draws."""
    count, device, times = len(target), target.device, network.times
    drawn = torch.multinomial(times.weight, _DRAWS * count, replacement=True)
    embedded = network.time_embedding(times.waves, times.still).index_select(0, drawn)
    kept = (torch.rand(count, 1, 1, device=device) >= _DROP).repeat(_DRAWS, 1, 1)
    mu, target, before = (x.repeat(_DRAWS, 1, 1) for x in (mu, target, before))
    noise, part = torch.randn_like(target), times.noise[drawn][:, None, None]
    noisy = target + part * (noise - target)
    wanted = (noisy - target) / times.time[drawn][:, None, None]
    velocity = network.velocity(noisy, mu * kept, embedded, before)
    return (velocity.float() - wanted).square().mean((1, 2)).view(_DRAWS, count).mean(0)


def _guidance(batch: Batch, logits: list[Tensor]) -> Tensor:
    """-> minus the logarithm of the share of attention that falls on the characters being spoken [n]."""
    length = batch["token_ids"].shape[1]
    row, column = batch["place"] // length, batch["place"] % length
    keys = torch.arange(length, device=row.device)
    own = batch["documents"][row] == batch["documents"][row, column][:, None]
    allowed = own & (keys <= column[:, None])
    wanted = (keys >= batch["span"][:, :1]) & (keys < batch["span"][:, 1:]) & allowed
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
