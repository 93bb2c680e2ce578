"""The block that all of the trained language models are made of, under its published parameter names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines [..., T, 1, head_dim / 2]."""
Attend = Callable[..., tuple[Tensor, Any]]
"""q, k, v [..., T, heads, head_dim] and what else `Block` was given -> the same shape, and something to return."""


def linear(x: Tensor, layer: nn.Linear) -> Tensor:
    return F.linear(x, layer.weight.to(x.dtype), None if layer.bias is None else layer.bias.to(x.dtype))


def layer_norm(x: Tensor, layer: nn.LayerNorm) -> Tensor:
    return F.layer_norm(x, layer.normalized_shape, layer.weight.to(x.dtype), layer.bias.to(x.dtype), layer.eps)


def rotary_of(places: Tensor, pairs: int, theta: float) -> Rotary:
    """places [..., 1], or [..., pairs] where each pair has its own -> [..., 1, pairs], in the published rounding."""
    angles = places.float() * (1.0 / theta ** (torch.arange(pairs, device=places.device) / pairs))
    return angles.cos()[..., None, :], angles.sin()[..., None, :]


def rotate(x: Tensor, rotary: Rotary) -> Tensor:
    """x [..., T, heads, head_dim], half-split."""
    (cos, sin), (u, v) = rotary, x.float().chunk(2, dim=-1)
    return torch.cat((u * cos - v * sin, v * cos + u * sin), dim=-1).to(x.dtype)


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * self.weight).to(x.dtype)


class Parts(nn.Module):
    """Modules under their published names. Their holder computes with them."""

    def __init__(self, **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)


class Block(nn.Module):
    def __init__(
        self,
        width: int,
        inner: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        eps: float = 1e-6,
        bias: bool = False,
        qk_norm: bool = False,
    ) -> None:
        super().__init__()
        self.head_dim, self.groups = head_dim, heads // kv_heads
        self.input_layernorm = RMSNorm(width, eps)
        self.self_attn = Parts(
            q_proj=nn.Linear(width, heads * head_dim, bias=bias),
            k_proj=nn.Linear(width, kv_heads * head_dim, bias=bias),
            v_proj=nn.Linear(width, kv_heads * head_dim, bias=bias),
            o_proj=nn.Linear(heads * head_dim, width, bias=False),
            **{name: RMSNorm(head_dim) if qk_norm else nn.Identity() for name in ("q_norm", "k_norm")},
        )
        self.post_attention_layernorm = RMSNorm(width, eps)
        sizes = {"gate_proj": (width, inner), "up_proj": (width, inner), "down_proj": (inner, width)}
        self.mlp = Parts(**{name: nn.Linear(*size, bias=False) for name, size in sizes.items()})

    def forward(self, x: Tensor, rotary: Rotary | None, attend: Attend, *where: Any) -> tuple[Tensor, Any]:
        y, attention, mlp = self.input_layernorm(x), self.self_attn, self.mlp
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        q, k, v = (linear(y, layer).unflatten(-1, (-1, self.head_dim)) for layer in projections)
        q, k = attention.q_norm(q), attention.k_norm(k)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        k, v = (kv.repeat_interleave(self.groups, dim=-2) for kv in (k, v))
        mixed, more = attend(q, k, v, *where)
        x = x + linear(mixed.flatten(-2), attention.o_proj)
        y = self.post_attention_layernorm(x)
        return x + linear(F.silu(linear(y, mlp.gate_proj)) * linear(y, mlp.up_proj), mlp.down_proj), more
