"""Qwen2-VL for training: packed rows, parameters under the published names, so that a state dict is a checkpoint.

The heads of `Auxiliary` are dropped at export: they say which shape and which letters lie in each cell, which teaches
the tower to see long before answers do.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn

from training import loop
from training.transformer import Block, Parts, RMSNorm, Rotary, layer_norm, linear, rotary_of, rotate
from training.vision.pictures import COLOR_NAMES, SHAPE_NAMES, SIZE_NAMES

PUBLISHED = Path(__file__).parents[2] / "models/embedded/qwen2_vl"
CONFIG: dict[str, Any] = json.loads((PUBLISHED / "config.json").read_text(encoding="utf-8"))
MEAN = (0.48145466, 0.4578275, 0.40821073)
STD = (0.26862954, 0.26130258, 0.27577711)
LETTERS_PER_CELL = 6
LETTER_CLASSES = 100
UNKNOWN = 255
"""A target of a cell of which nothing is known."""
SHAPE_CLASSES, COLOR_CLASSES, SIZE_CLASSES = 1 + len(SHAPE_NAMES), 1 + len(COLOR_NAMES), 1 + len(SIZE_NAMES)
_SPREAD = 1024


@dataclass(frozen=True)
class Packed:
    """A batch. frames uint8 [F, 588]; first and second int64 [P]: rows of `frames` that make a pair of patches;
    coordinates int [P, 2]; ids and source int64 [L]: a token, or where it is 0 or more the row of vision that stands
    there; positions int [3, L]; both cu int32 with their largest lengths; selected int64 [K]: positions with a label.
    """

    frames: Tensor
    first: Tensor
    second: Tensor
    coordinates: Tensor
    vision_cu: Tensor
    ids: Tensor
    source: Tensor
    positions: Tensor
    text_cu: Tensor
    selected: Tensor
    longest: int


def attend(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int, causal: bool) -> tuple[Tensor, None]:
    """Attention inside segments: q, k, v [n, heads, head_dim]."""
    if q.is_cuda:
        window = (-1, 0 if causal else -1)
        return cast(Tensor, varlen_attn(q, k, v, cu, cu, longest, longest, window_size=window)), None
    parts = []
    for start, stop in pairwise(cu.tolist()):
        if stop > start:
            one, two, three = (rows[start:stop].transpose(0, 1)[None] for rows in (q, k, v))
            parts.append(F.scaled_dot_product_attention(one, two, three, is_causal=causal)[0].transpose(0, 1))
    return torch.cat(parts), None


def rows_of(table: Tensor, index: Tensor) -> Tensor:
    """table[index], whose gradient is added up by atomics, in float32: that of indexing sorts first."""
    return table.float().index_select(0, index).to(table.dtype)


class VisionBlock(nn.Module):
    def __init__(self, hidden_size: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(hidden_size, eps=1e-6)
        self.attn = Parts(qkv=nn.Linear(hidden_size, 3 * hidden_size), proj=nn.Linear(hidden_size, hidden_size))
        self.norm2 = nn.LayerNorm(hidden_size, eps=1e-6)
        self.mlp = Parts(fc1=nn.Linear(hidden_size, 4 * hidden_size), fc2=nn.Linear(4 * hidden_size, hidden_size))

    def forward(self, x: Tensor, rotary: Rotary, cu: Tensor, longest: int) -> Tensor:
        q, k, v = linear(layer_norm(x, self.norm1), self.attn.qkv).view(len(x), 3, self.heads, -1).unbind(1)
        mixed, _ = attend(rotate(q, rotary), rotate(k, rotary), v.contiguous(), cu, longest, False)
        x = x + linear(mixed.flatten(1), self.attn.proj)
        hidden = linear(layer_norm(x, self.norm2), self.mlp.fc1)
        return x + linear(hidden * torch.sigmoid(1.702 * hidden), self.mlp.fc2)


class Merger(nn.Module):
    def __init__(self, hidden_size: int, out: int) -> None:
        super().__init__()
        self.ln_q = nn.LayerNorm(hidden_size, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(4 * hidden_size, 4 * hidden_size), nn.GELU(), nn.Linear(4 * hidden_size, out)
        )

    def forward(self, x: Tensor) -> Tensor:
        merged = layer_norm(x, self.ln_q).view(-1, 4 * x.shape[1])
        return linear(F.gelu(linear(merged, self.mlp[0])), self.mlp[2])  # type: ignore[arg-type]


class Visual(nn.Module):
    mean: Tensor
    std: Tensor

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        vision = config["vision_config"]
        width, heads, size = vision["embed_dim"], vision["num_heads"], (2, 14, 14)
        self.patch_embed = Parts(proj=nn.Conv3d(3, width, size, stride=size, bias=False))
        self.blocks = nn.ModuleList(VisionBlock(width, heads) for _ in range(vision["depth"]))
        self.merger = Merger(width, config["hidden_size"])
        self.quarter = width // heads // 4
        self.register_buffer("mean", torch.tensor(MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(STD).view(3, 1, 1), persistent=False)

    def embed(self, frames: Tensor, first: Tensor, second: Tensor) -> Tensor:
        # Attention kernels take no float32 on a GPU.
        dtype = torch.bfloat16 if frames.is_cuda else torch.float32
        pixels = torch.stack((frames[first].view(-1, 3, 196), frames[second].view(-1, 3, 196)), dim=2)
        normed = ((pixels.float() / 255 - self.mean) / self.std).to(dtype)
        return F.linear(normed.flatten(1), self.patch_embed.proj.weight.to(dtype).flatten(1))

    def forward(self, batch: Packed) -> Tensor:
        x = self.embed(batch.frames, batch.first, batch.second)
        cos, sin = rotary_of(batch.coordinates[..., None], self.quarter, 10_000.0)
        rotary = cos.flatten(1)[:, None], sin.flatten(1)[:, None]
        for block in self.blocks:
            x = block(x, rotary, batch.vision_cu, batch.longest)
        return self.merger(x)


class Language(nn.Module):
    axes: Tensor

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, heads = config["hidden_size"], config["num_attention_heads"]
        sizes = (width, config["intermediate_size"], heads, config["num_key_value_heads"], width // heads)
        self.embed_tokens = nn.Embedding(config["vocab_size"], width)
        self.layers = nn.ModuleList(Block(*sizes, bias=True) for _ in range(config["num_hidden_layers"]))
        self.norm = RMSNorm(width)
        self.theta, section = config["rope_theta"], torch.tensor(config["rope_scaling"]["mrope_section"])
        axes = torch.repeat_interleave(torch.arange(3), section)
        self.register_buffer("axes", axes, persistent=False)

    def forward(self, batch: Packed, vision: Tensor) -> Tensor:
        """Hidden values of the selected positions [K, hidden_size]."""
        # Text takes rows of zeros behind the vision, each another one, so that their gradients do not queue.
        spread = len(vision) + torch.arange(len(batch.source), device=vision.device) % _SPREAD
        seen = rows_of(F.pad(vision, (0, 0, 0, _SPREAD)), torch.where(batch.source >= 0, batch.source, spread))
        x = seen + self.words(torch.where(batch.source >= 0, -1, batch.ids), vision.dtype)
        rotary = rotary_of(batch.positions[self.axes].T, len(self.axes), self.theta)
        for layer in self.layers:
            x, _ = layer(x, rotary, attend, batch.text_cu, batch.longest, True)
        return self.norm(rows_of(x, batch.selected))

    def words(self, ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Embeddings [n, hidden_size], zero for id -1, as a matmul: a lookup's gradient adds the rows of a frequent
        word one after the other."""
        chosen = ids[:, None] == torch.arange(len(self.embed_tokens.weight), device=ids.device)
        return chosen.to(dtype) @ self.embed_tokens.weight.to(dtype)


class Auxiliary(nn.Module):
    """What each cell of 28 x 28 pixels holds: the shape whose centre it has, and its letters from left to right."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.sizes = (SHAPE_CLASSES, COLOR_CLASSES, SIZE_CLASSES, *([LETTER_CLASSES] * LETTERS_PER_CELL))
        self.norm = RMSNorm(hidden_size)
        self.head = nn.Linear(hidden_size, sum(self.sizes))

    def forward(self, vision: Tensor, targets: Tensor, still: Tensor) -> tuple[Tensor, Tensor]:
        """targets int64 [R, 9], 0 for nothing; still float [R], 0 for cells that do not count, nor do those whose
        targets are UNKNOWN -> losses of shapes and of letters. Cells that hold something count as much as all others
        together."""
        still = still * (targets[:, 0] != UNKNOWN)
        targets = torch.where(targets == UNKNOWN, 0, targets)
        logits = linear(self.norm(vision), self.head).float().split(self.sizes, dim=-1)
        losses = []
        for group in (slice(0, 3), slice(3, 9)):
            held = (targets[:, group.start] > 0).float() * still
            empty = still - held
            weight = held / held.sum().clamp(min=1) + empty / empty.sum().clamp(min=1)
            pairs = zip(logits[group], targets.T[group], strict=True)
            each = [(F.cross_entropy(said, right, reduction="none") * weight).sum() for said, right in pairs]
            losses.append(torch.stack(each).mean())
        return losses[0], losses[1]


class Network(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        """config: config.json."""
        super().__init__()
        self.visual, self.model = Visual(config), Language(config)
        self.auxiliary = Auxiliary(config["hidden_size"])
        self._initialise(config["num_hidden_layers"])

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.model.embed_tokens.weight.to(hidden.dtype)).float()

    def _initialise(self, layers: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.ndim < 2:
                continue
            deviation = 0.02 if "embed_tokens" in name else parameter[0].numel() ** -0.5
            if name.endswith(("o_proj.weight", "down_proj.weight", "fc2.weight", "attn.proj.weight")):
                deviation /= (2 * layers) ** 0.5
            nn.init.trunc_normal_(parameter, std=deviation, a=-3 * deviation, b=3 * deviation)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)


def load(weights: Path, device: torch.device) -> Network:
    """The network with a state's or a checkpoint's weights in float32."""
    network = Network(CONFIG)
    loop.load(network, weights)
    return network.to(device)
