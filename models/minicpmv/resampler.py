"""The resampler: learned queries read the patches of a group of slices by one cross-attention.

Source: resampler.py of the published checkpoints; for 4.5 its batched path (batch_infer).
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.interfaces.errors import CheckpointError
from models.interfaces.rule import Rule
from models.layers.attention import varlen_attention
from models.layers.packed import layer_norm
from models.minicpmv.slicing import MAX_PATCHES_PER_SIDE

_VALUES_PER_HEAD = 128
"""A head has at least this many values: there are as many heads as that allows."""
_NORM_EPS = 1e-6


class Resampler(nn.Module):
    """Patches [P, vision_hidden_size] of consecutive groups -> [groups * num_queries, hidden_size].

    in_proj holds the rows of q, then k, then v. Keys carry sine positions of the patch, and with `temporal` of the
    time; values carry none. The projected queries depend only on weights and are computed once, by `prepare`.
    """

    queries: Tensor
    side_table: Tensor
    temporal_frequencies: Tensor | None

    def __init__(self, vision_hidden_size: int, hidden_size: int, num_queries: int, *, temporal: bool) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.head_dim = head_dim(hidden_size)
        self.num_queries = num_queries
        self.query = nn.Parameter(torch.empty(num_queries, hidden_size))
        self.kv_proj = nn.Linear(vision_hidden_size, hidden_size, bias=False)
        self.in_proj = nn.Linear(hidden_size, 3 * hidden_size)
        self.out_proj = nn.Linear(hidden_size, hidden_size)
        self.query_norm = nn.LayerNorm(hidden_size, eps=_NORM_EPS)
        self.kv_norm = nn.LayerNorm(hidden_size, eps=_NORM_EPS)
        self.final_norm = nn.LayerNorm(hidden_size, eps=_NORM_EPS)
        self.proj = nn.Parameter(torch.empty(hidden_size, hidden_size))
        sides = np.arange(MAX_PATCHES_PER_SIDE, dtype=np.float32)
        angles = torch.from_numpy(np.outer(sides, _frequencies(hidden_size // 2)))
        self.register_buffer("side_table", torch.cat((angles.sin(), angles.cos()), dim=1), persistent=False)
        frequencies = torch.from_numpy(_frequencies(hidden_size)) if temporal else None
        self.register_buffer("temporal_frequencies", frequencies, persistent=False)

    def prepare(self) -> None:
        """Constants of the loaded weights, in their dtype."""
        weight, bias = self.in_proj.weight[: self.hidden_size], self.in_proj.bias[: self.hidden_size]
        queries = F.linear(self.query_norm(self.query), weight, bias)
        self.register_buffer("queries", queries.unflatten(-1, (-1, self.head_dim)), persistent=False)
        self.side_table = self.side_table.to(weight.dtype)

    def forward(
        self,
        patches: Tensor,
        coordinates: Tensor,
        cu_groups: Tensor,
        *,
        temporal_ids: Tensor | None = None,
        slice_ids: Tensor | None = None,
    ) -> Tensor:
        """coordinates int32 [P, 2] (column, row); cu_groups int32 [groups + 1]; temporal_ids int32 [slices], negative
        for none, read through slice_ids int32 [P]."""
        values = layer_norm(self.kv_proj(patches), self.kv_norm)
        keys = values + self.side_table[coordinates].flatten(1)
        if self.temporal_frequencies is not None:
            assert temporal_ids is not None and slice_ids is not None
            # Rounded after each of the two sums, as published.
            keys = keys + self._temporal_table(temporal_ids)[slice_ids]
        weights, biases = self.in_proj.weight.chunk(3), self.in_proj.bias.chunk(3)
        keys = F.linear(keys, weights[1], biases[1])
        values = F.linear(values, weights[2], biases[2])
        groups = cu_groups.shape[0] - 1
        bounds = torch.arange(groups + 1, dtype=torch.int32, device=cu_groups.device) * self.num_queries
        attended = varlen_attention(
            self.queries.repeat(groups, 1, 1),
            keys.unflatten(-1, (-1, self.head_dim)),
            values.unflatten(-1, (-1, self.head_dim)),
            bounds,
            cu_groups,
        )
        return layer_norm(self.out_proj(attended.flatten(-2)), self.final_norm) @ self.proj

    def _temporal_table(self, temporal_ids: Tensor) -> Tensor:
        """[slices, hidden_size]: sines and cosines of each slice's time, zeros for none."""
        assert self.temporal_frequencies is not None
        angles = temporal_ids.float()[:, None] * self.temporal_frequencies
        table = torch.cat((angles.sin(), angles.cos()), dim=1)
        return torch.where(temporal_ids[:, None] >= 0, table, 0.0).to(self.side_table.dtype)


def head_dim(hidden_size: int) -> int:
    """Raises CheckpointError for a width that heads cannot share."""
    heads = hidden_size // _VALUES_PER_HEAD
    if heads == 0 or hidden_size % heads or hidden_size % 4:
        raise CheckpointError(
            f"config.json: hidden_size {hidden_size}: the resampler needs a multiple of 4 and of its heads, one for "
            f"every {_VALUES_PER_HEAD} values"
        )
    return hidden_size // heads


def _frequencies(hidden_size: int) -> np.ndarray:
    """float32 [hidden_size / 2]: 1 / 10000^(j / (hidden_size / 2)), rounded as the published NumPy code rounds."""
    exponents = np.arange(hidden_size // 2, dtype=np.float32) / np.float32(hidden_size / 2)
    return np.float32(1) / np.float32(10000) ** exponents


def resampler_rules(ours: str) -> list[Rule]:
    """Published names to a Resampler under the prefix `ours`, which ends in "."."""
    names = {
        "query": "query",
        "kv_proj.weight": "kv_proj.weight",
        "attn.in_proj_weight": "in_proj.weight",
        "attn.in_proj_bias": "in_proj.bias",
        "attn.out_proj.{rest}": "out_proj.{rest}",
        "ln_q.{rest}": "query_norm.{rest}",
        "ln_kv.{rest}": "kv_norm.{rest}",
        "ln_post.{rest}": "final_norm.{rest}",
        "proj": "proj",
    }
    return [Rule(f"resampler.{published}", f"{ours}{name}") for published, name in names.items()]
