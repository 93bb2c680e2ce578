"""VoxCPM2's networks as they are trained: whole sequences at once, gradients, published parameter names.

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

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines [..., T, 1, head_dim / 2]."""


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight.to(
            x.dtype
        )


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """x [..., T, heads, head_dim]."""
    (cos, sin), (a, b) = rotary, x.float().chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim, self.groups = head_dim, heads // kv_heads
        self.q_proj = nn.Linear(width, heads * head_dim, bias=False)
        self.k_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.v_proj = nn.Linear(width, kv_heads * head_dim, bias=False)
        self.o_proj = nn.Linear(heads * head_dim, width, bias=False)

    def forward(
        self, x: Tensor, rotary: Rotary | None, mask: Tensor | None, heads: int
    ) -> tuple[Tensor, Tensor | None]:
        """x [N, T, width]; mask bool [N, 1, T, T] or None for all to all. heads: of how many, from the first on, the
        logits [N, heads, T, T] float32 are returned, too."""
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)) for layer in (self.q_proj, self.k_proj, self.v_proj))
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        q, k, v = (y.transpose(1, 2) for y in (q, k, v))
        k, v = (y.repeat_interleave(self.groups, dim=1) for y in (k, v))
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)
        logits = None
        if heads:
            logits = (q[:, :heads] @ k[:, :heads].transpose(2, 3)).float() / math.sqrt(self.head_dim)
        return self.o_proj(out), logits


class MLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, width: int, inner: int, heads: int, kv_heads: int, head_dim: int, eps: float) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(width, eps)
        self.self_attn = Attention(width, heads, kv_heads, head_dim)
        self.post_attention_layernorm = RMSNorm(width, eps)
        self.mlp = MLP(width, inner)

    def forward(
        self, x: Tensor, rotary: Rotary | None, mask: Tensor | None, heads: int = 0
    ) -> tuple[Tensor, Tensor | None]:
        attended, logits = self.self_attn(self.input_layernorm(x), rotary, mask, heads)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), logits


class Stack(nn.Module):
    def __init__(self, config: dict[str, Any], part: dict[str, Any], layers: int) -> None:
        super().__init__()
        lm = config["lm_config"]
        width, inner = part.get("hidden_dim") or part["hidden_size"], part.get("ffn_dim") or part["intermediate_size"]
        heads = part.get("num_heads") or part["num_attention_heads"]
        shape = (width, inner, heads, lm["num_key_value_heads"], part["kv_channels"], lm["rms_norm_eps"])
        self.layers = nn.ModuleList(Block(*shape) for _ in range(layers))
        self.norm = RMSNorm(width, lm["rms_norm_eps"])
        for block in self.layers:
            for out in (block.self_attn.o_proj, block.mlp.down_proj):  # type: ignore[union-attr]
                out.weight.data.mul_((2 * layers) ** -0.5)  # type: ignore[union-attr, operator]

    def forward(
        self, x: Tensor, rotary: Rotary | None, mask: Tensor | None, guided: dict[int, int] | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """guided: layer -> number of heads whose logits are returned."""
        all_logits = []
        for index, block in enumerate(self.layers):
            x, logits = block(x, rotary, mask, (guided or {}).get(index, 0))
            if logits is not None:
                all_logits.append(logits)
        return self.norm(x), all_logits


class LocalEncoder(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        part = config["encoder_config"]
        self.in_proj = nn.Linear(config["feat_dim"], part["hidden_dim"])
        self.special_token = nn.Parameter(torch.randn(1, 1, 1, part["hidden_dim"]))
        self.encoder = Stack(config, part, part["num_layers"])

    def forward(self, patches: Tensor, rotary: Rotary) -> Tensor:
        tokens = self.in_proj(patches)
        special = self.special_token[0].expand(len(patches), -1, -1).to(tokens.dtype)
        return self.encoder(torch.cat((special, tokens), dim=1), rotary, None)[0][:, 0]


class TimeMLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear_1 = nn.Linear(width, width)
        self.linear_2 = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(F.silu(self.linear_1(x)))


class Estimator(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        part, features = config["dit_config"], config["feat_dim"]
        width = part["hidden_dim"]
        self.in_proj = nn.Linear(features, width)
        self.cond_proj = nn.Linear(features, width)
        self.out_proj = nn.Linear(width, features)
        self.time_mlp = TimeMLP(width)
        self.delta_time_mlp = TimeMLP(width)
        self.decoder = Stack(config, part, part["num_layers"])

    def time_embedding(self, waves: Tensor, still: Tensor) -> Tensor:
        return self.time_mlp(waves) + self.delta_time_mlp(still)

    def forward(self, x: Tensor, mu: Tensor, time: Tensor, previous: Tensor, rotary: Rotary) -> Tensor:
        """x and previous [n, P, D], mu [n, 2, h], time [n, h] -> velocity [n, P, D]."""
        noisy, before = self.in_proj(x), self.cond_proj(previous)
        tokens = torch.cat((mu.to(noisy.dtype), time[:, None].to(noisy.dtype), before, noisy), dim=1)
        return self.out_proj(self.decoder(tokens, rotary, None)[0][:, -x.shape[1] :])


class Quantizer(nn.Module):
    def __init__(self, width: int, latent: int, scale: int) -> None:
        super().__init__()
        self.in_proj = nn.Linear(width, latent)
        self.out_proj = nn.Linear(latent, width)
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """The rounding has the gradient 1."""
        smooth = torch.tanh(self.in_proj(x).float())
        rounded = smooth + ((smooth * self.scale).round() / self.scale - smooth).detach()
        return self.out_proj(rounded.to(x.dtype))


class Decoder(nn.Module):
    """Holds the estimator under its published name."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.estimator = Estimator(config)


class Times(NamedTuple):
    """What the solvers ask the estimator at: of each evaluation the noise's part s of x = (1 - s) data + s noise, and
    t with velocity (x - data) / t; waves: the sinusoids of t, in the roundings of both dtypes. weight: how often."""

    noise: Tensor
    time: Tensor
    waves: Tensor
    still: Tensor
    weight: Tensor


def solver_times(width: int, device: torch.device) -> Times:
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
    values = (torch.tensor(noise), torch.tensor(time), torch.cat(waves), still, torch.tensor(weight))
    return Times(*(value.to(device) for value in values))


class Network(nn.Module):
    """All of model.safetensors."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        lm, width, dit = config["lm_config"], config["lm_config"]["hidden_size"], config["dit_config"]["hidden_dim"]
        self.base_lm = Stack(config, lm, lm["num_hidden_layers"])
        self.base_lm.embed_tokens = nn.Embedding(lm["vocab_size"], width)
        self.residual_lm = Stack(config, lm, config["residual_lm_num_layers"])
        self.feat_encoder = LocalEncoder(config)
        self.feat_decoder = Decoder(config)
        latent, scale = config["scalar_quantization_latent_dim"], config["scalar_quantization_scale"]
        self.fsq_layer = Quantizer(width, latent, scale)
        self.enc_to_lm_proj = nn.Linear(config["encoder_config"]["hidden_dim"], width)
        self.lm_to_dit_proj = nn.Linear(width, dit)
        self.res_to_dit_proj = nn.Linear(width, dit)
        self.fusion_concat_proj = nn.Linear(2 * width, width)
        self.stop_proj = nn.Linear(width, width)
        self.stop_head = nn.Linear(width, 2, bias=False)

    def rotary(self, positions: Tensor) -> Rotary:
        """positions int64 [...] -> for the stacks, in the published rounding of a float32 model."""
        lm = self.config["lm_config"]
        size = lm["kv_channels"]
        exponents = torch.arange(0, size, 2, dtype=torch.float32, device=positions.device) / size
        angles = positions[..., None].float() * (1.0 / lm["rope_theta"] ** exponents)
        return angles.cos()[..., None, :], angles.sin()[..., None, :]

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
        hidden = torch.where(audio, self.fsq_layer(hidden), hidden)
        fused = self.fusion_concat_proj(torch.cat((hidden, torch.where(audio, embeds, 0.0)), dim=-1))
        return hidden, self.residual_lm(fused, None, mask)[0], logits

    def embed_patches(self, patches: Tensor) -> Tensor:
        """[n, P, D] -> [n, H]."""
        rotary = self.rotary(torch.arange(patches.shape[1] + 1, device=patches.device))
        return self.enc_to_lm_proj(self.feat_encoder(patches, rotary))

    def condition(self, lm: Tensor, residual: Tensor) -> Tensor:
        """[n, H] each -> mu [n, 2, h]."""
        return torch.stack((self.lm_to_dit_proj(lm), self.res_to_dit_proj(residual)), dim=1)

    def velocity(self, x: Tensor, mu: Tensor, time: Tensor, previous: Tensor) -> Tensor:
        rotary = self.rotary(torch.arange(3 + 2 * x.shape[1], device=x.device))
        return self.feat_decoder.estimator(x, mu, time, previous, rotary)

    def stop_logits(self, lm: Tensor) -> Tensor:
        return self.stop_head(F.silu(self.stop_proj(lm)))
