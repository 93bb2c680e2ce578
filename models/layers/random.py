"""Counter-based random numbers: a pure function of (seed, step, index), the same in any batch and on any device.

Philox 4x32-10 (Salmon et al., SC11, https://doi.org/10.1145/2063384.2063405) and Box-Muller. Integers are exact
everywhere; normals agree up to the devices' log, sqrt, sin and cos.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from models.layers.op import op

Noise = Callable[[Tensor, Tensor], Tensor]
"""seeds int64 [rows], steps int [rows] -> float32 [rows, ...]."""

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_MASK = 0xFFFFFFFF


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four random words from a counter of four and a key of two words; words are int64 tensors in 0..2^32 - 1."""
    c0, c1, c2, c3 = counter
    # Two words at a time: on a CPU, dispatching an operation takes longer than these few numbers.
    even, odd, round_key = torch.stack((c0, c2)), torch.stack((c1, c3)), torch.stack(key)
    multipliers, key_steps = (
        torch.stack([torch.full_like(key[0], word) for word in words]) for words in (_MULTIPLIERS, _KEY_STEPS)
    )
    for _ in range(_ROUNDS):
        high, low = _multiply(multipliers, even)
        even, odd = high.flip(0) ^ odd ^ round_key, low.flip(0)
        round_key = (round_key + key_steps) & _MASK
    return even[0], odd[0], even[1], odd[1]


def _multiply(multiplier: Tensor, word: Tensor) -> tuple[Tensor, Tensor]:
    """High and low word of the product, in halves so that no int64 overflows."""
    low, high = multiplier * (word & 0xFFFF), multiplier * (word >> 16)
    return (high + (low >> 16)) >> 16, (((high & 0xFFFF) << 16) + low) & _MASK


@op(cuda="models.layers.kernels.random:philox_normal")
def philox_normal(seeds: Tensor, steps: Tensor, count: int) -> Tensor:
    """Standard normals float32 [rows, count] of seeds int64 [rows] and steps int [rows]; count a multiple of 4.

    Values 4b..4b + 3 of a row come from counter (b, step, 0, 0) and the key made of the seed's two words.
    """
    if count % 4:
        raise ValueError(f"count {count} is not a multiple of 4")
    blocks = torch.arange(count // 4, device=seeds.device)[None, :].expand(seeds.shape[0], -1)
    step = (steps.to(torch.int64) & _MASK)[:, None].expand_as(blocks)
    zero = torch.zeros_like(blocks)
    key = ((seeds & _MASK)[:, None], ((seeds >> 32) & _MASK)[:, None])
    words = philox((blocks, step, zero, zero), key)
    first, second = _box_muller(words[0], words[1]), _box_muller(words[2], words[3])
    return torch.stack((*first, *second), dim=-1).flatten(1)


def _box_muller(radius_word: Tensor, angle_word: Tensor) -> tuple[Tensor, Tensor]:
    uniform = ((radius_word >> 8).float() + 0.5) * 2.0**-24
    radius = torch.sqrt(-2.0 * torch.log(uniform))
    angle = (angle_word >> 8).float() * (2.0 * math.pi * 2.0**-24)
    return radius * torch.cos(angle), radius * torch.sin(angle)
