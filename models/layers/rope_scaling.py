"""How config.json stretches rotary frequencies for prompts longer than a model was first trained for."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from models.interfaces.errors import CheckpointError
from models.layers.rotary import inverse_frequencies, rotary_cos_sin, section_axes


@dataclass(frozen=True)
class LongRope:
    """LongRoPE (arXiv:2402.13753) as Llama-form MiniCPM4 uses it: frequencies are divided by `factors`, head_dim / 2
    numbers, and cosines and sines multiplied by `scale`."""

    factors: tuple[float, ...]
    scale: float

    def frequencies(self, head_dim: int, theta: float) -> Tensor:
        """float32 [head_dim / 2]."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
        return 1.0 / (torch.tensor(self.factors, dtype=torch.float32, device="cpu") * theta**exponents)


@dataclass(frozen=True)
class Yarn:
    """YaRN (arXiv:2309.00071, section 3.2): frequencies that turn at least `beta_fast` times in original_max_positions
    stay, those that turn at most `beta_slow` times are divided by `factor`, and those in between are mixed.

    truncate: the first and the last mixed one are rounded outwards to whole numbers, as published.
    scale: factor of cosines and sines.
    """

    factor: float
    original_max_positions: int
    beta_fast: float
    beta_slow: float
    truncate: bool
    scale: float

    def frequencies(self, head_dim: int, theta: float) -> Tensor:
        """float32 [head_dim / 2]."""
        low, high = (
            head_dim * math.log(self.original_max_positions / (turns * 2 * math.pi)) / (2 * math.log(theta))
            for turns in (self.beta_fast, self.beta_slow)
        )
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        if low == high:
            high += 0.001
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
        periods = theta**exponents
        ramp = (torch.arange(head_dim // 2, dtype=torch.float32, device="cpu") - low) / (high - low)
        kept = 1 - ramp.clamp(0, 1)
        # In the order of transformers' sums, so that the frequencies are its frequencies to the last bit.
        return 1.0 / (self.factor * periods) * (1 - kept) + 1.0 / periods * kept


def read_rope_scaling(
    rope: Mapping[str, Any], head_dim: int, max_positions: int
) -> tuple[tuple[int, ...], LongRope | Yarn | None]:
    """The mrope_section, () if there is none, and how frequencies are stretched, from what
    models.layers.rope_field.rope_field found. Raises CheckpointError for a type that is not supported, KeyError for
    a field that is missing."""
    kind = _rope_type(rope)
    sections = tuple(int(size) for size in rope.get("mrope_section", ()))
    # Interleaved sections need not add up: as in the reference, turns beyond head_dim / 2 are dropped.
    if sections and sum(sections) != head_dim // 2 and not rope.get("mrope_interleaved"):
        raise CheckpointError(f"config.json: mrope_section {sections} must sum to {head_dim // 2}")
    if kind == "default":
        return sections, None
    if kind == "yarn":
        return sections, _yarn(rope, max_positions)
    if kind == "longrope" and not sections:
        return (), _longrope(rope, head_dim, max_positions)
    raise CheckpointError(f"config.json: rope_scaling type {kind!r} is not supported")


def _rope_type(rope: Mapping[str, Any]) -> str:
    """transformers 4.45 and later write rope_type "default" instead of "mrope"; mrope_section stays."""
    kinds = [rope[name] for name in ("rope_type", "type") if rope.get(name)]
    named = {"default" if kind == "mrope" else str(kind) for kind in kinds}
    if len(named) > 1:
        # Of these two, releases of transformers prefer different ones.
        raise CheckpointError(
            f"config.json: rope_scaling.rope_type is {rope['rope_type']!r}, but type, its older name, is "
            f"{rope['type']!r}"
        )
    return named.pop() if named else "default"


def _yarn(rope: Mapping[str, Any], max_positions: int) -> Yarn:
    """Fields that are absent or null have the values of transformers."""
    for name in ("mscale", "mscale_all_dim"):
        if rope.get(name) is not None:
            raise CheckpointError(f"config.json: {name} of a rope_scaling of type 'yarn' is not supported")
    original = int(rope.get("original_max_position_embeddings") or max_positions)
    factor = float(rope["factor"] or max_positions / original)
    default_scale = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    fast, slow = float(rope.get("beta_fast") or 32), float(rope.get("beta_slow") or 1)
    scale = rope.get("attention_factor")
    return Yarn(
        factor=factor,
        original_max_positions=original,
        beta_fast=fast,
        beta_slow=slow,
        truncate=bool(rope.get("truncate", True)),
        scale=default_scale if scale is None else float(scale),
    )


def _longrope(rope: Mapping[str, Any], head_dim: int, max_positions: int) -> LongRope:
    if rope.get("attention_factor") is not None:
        raise CheckpointError("config.json: attention_factor of a rope_scaling of type 'longrope' is not supported")
    factor, original = rope.get("factor"), int(rope["original_max_position_embeddings"])
    if max_positions > original and rope["long_factor"] != rope["short_factor"]:
        # The reference switches to the long factors with the first prompt that is longer than the original length.
        raise CheckpointError(
            f"config.json: max_position_embeddings {max_positions} is over original_max_position_embeddings "
            f"{original}, and long_factor is not short_factor: factors that change with the length are not supported"
        )
    for name in ("short_factor", "long_factor"):
        if len(rope[name]) != head_dim // 2:
            raise CheckpointError(
                f"config.json: rope_scaling.{name} has {len(rope[name])} numbers, expected {head_dim // 2} for a "
                f"head_dim of {head_dim}"
            )
    stretch = max_positions / original if factor is None else float(factor)
    scale = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    return LongRope(tuple(rope["short_factor"]), scale)


def scaled_frequencies(scaling: LongRope | Yarn | None, head_dim: int, theta: float) -> tuple[Tensor, float]:
    """Frequencies float32 [head_dim / 2], and the factor of cosines and sines."""
    if scaling is None:
        return inverse_frequencies(head_dim, theta), 1.0
    return scaling.frequencies(head_dim, theta), scaling.scale


class Rotary(nn.Module):
    """positions int64 [axes, n] -> cos and sin float32 [n, head_dim / 2]. sections: of M-RoPE, one for each axis."""

    frequencies: Tensor
    axes: Tensor | None

    def __init__(
        self,
        head_dim: int,
        theta: float,
        scaling: LongRope | Yarn | None = None,
        sections: Sequence[int] = (),
        *,
        interleaved: bool = False,
    ) -> None:
        super().__init__()
        frequencies, self.scale = scaled_frequencies(scaling, head_dim, theta)
        axes = section_axes(sections, interleaved=interleaved, count=len(frequencies)) if sections else None
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.register_buffer("axes", axes, persistent=False)

    def forward(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        positions = positions if self.axes is not None else positions[0]
        return rotary_cos_sin(positions, self.frequencies, self.axes, scale=self.scale)
