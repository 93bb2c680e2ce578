"""Choosing tokens from logits, inside a captured graph: no sort over the vocabulary, no random state.

A random number is a function of (seed, number of tokens generated), so a sequence draws the same tokens in any batch
and after a preemption. Drawing inverts the cumulative distribution at that number. Filters find their threshold by a
binary search over the 32 bits of a float. Order: penalties, bias, minimum length, temperature, min_p, top_k, top_p.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from models.layers.op import op
from models.layers.random import philox
from service.engine.chat.slot_state import IntColumn, SlotState
from service.link.sampling import FloatColumn

_BLOCK = 256
_STREAM = 1
"""Third word of the counter: separates these numbers from others made from the same seed."""


def uniform(seeds: Tensor, steps: Tensor) -> Tensor:
    """seeds and steps int64 [rows] -> float64 [rows] in the open interval (0, 1)."""
    zero = torch.zeros_like(seeds)
    key = (seeds & 0xFFFFFFFF, (seeds >> 32) & 0xFFFFFFFF)
    words = philox((zero, steps & 0xFFFFFFFF, zero + _STREAM, zero), key)
    return ((words[0] >> 6).double() * 2.0**27 + (words[1] >> 5).double() + 0.5) * 2.0**-53


def draw(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draws an index per row in proportion to weights float32 [rows, n] (not all 0) -> int64 [rows].

    Inverse distribution in two levels, blocks and then entries of one block, so that sums stay exact enough and an
    entry of weight 0 cannot be drawn.
    """
    blocks = F.pad(weights, (0, -weights.shape[1] % _BLOCK)).unflatten(1, (-1, _BLOCK))
    sums = blocks.sum(dim=-1).double()
    ends = sums.cumsum(dim=-1)
    target = (uniforms * ends[:, -1])[:, None]
    block = _first((ends > target) & (sums > 0), sums)
    start = ends.gather(1, block) - sums.gather(1, block)
    entries = blocks.gather(1, block[:, :, None].expand(-1, -1, _BLOCK)).squeeze(1)
    ends = start + entries.double().cumsum(dim=-1)
    return (block * _BLOCK + _first((ends > target) & (entries > 0), entries)).squeeze(1)


def _first(mask: Tensor, weights: Tensor) -> Tensor:
    """First true column [rows, 1]; where rounding left none, the column of largest weight."""
    first = mask.to(torch.int8).argmax(dim=-1, keepdim=True)
    return torch.where(mask.any(dim=-1, keepdim=True), first, weights.argmax(dim=-1, keepdim=True))


def sample(logits: Tensor, temperature: Tensor, uniforms: Tensor) -> Tensor:
    """logits float32 [rows, vocabulary], temperature float32 [rows] (0: greedy) -> int64 [rows]."""
    greedy = logits.argmax(dim=-1)
    scaled = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
    weights = scaled.sub_(scaled.amax(dim=-1, keepdim=True)).exp_()
    return torch.where(temperature > 0, draw(weights, uniforms), greedy)


def ordered_bits(values: Tensor) -> Tensor:
    """float32 -> int32 in the same order."""
    bits = (values + 0.0).contiguous().view(torch.int32)  # -0.0 + 0.0 is 0.0: the two are one number.
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def threshold(keys: Tensor, weights: Tensor, target: Tensor) -> Tensor:
    """The largest key of each row such that entries of at least that key weigh at least `target`.

    keys int32 [rows, n], weights [rows, n], target [rows] (at most the row's sum) -> int64 [rows, 1]. One bit of the
    answer per pass.
    """
    found = torch.full_like(target, -(2**31), dtype=torch.int64)[:, None]
    for bit in reversed(range(32)):
        higher = found + (1 << bit)
        reached = torch.where(keys >= higher, weights, 0).sum(dim=-1) >= target
        found = torch.where(reached[:, None], higher, found)
    return found


@op(cuda="service.engine.chat.step_kernels:filtered")
def filtered(logits: Tensor, ints: Tensor, floats: Tensor) -> Tensor:
    """Logits float32 [rows, n] with -inf where a filter excludes; decided after temperature, ties at a border stay.
    NaN and inf stay, for corrupt_rows.

    ints int64 [rows, len(IntColumn)] and floats float32 [rows, len(FloatColumn)]: the rows' slot state, of which this
    reads TEMPERATURE (0 counts as 1), MIN_P, TOP_K and TOP_P; 0, below 1 and 1 switch these filters off.
    """
    temperature, min_p = floats[:, FloatColumn.TEMPERATURE], floats[:, FloatColumn.MIN_P]
    top_k, top_p = ints[:, IntColumn.TOP_K], floats[:, FloatColumn.TOP_P]
    size = logits.shape[-1]
    scaled = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
    floor = scaled.amax(dim=-1, keepdim=True) + torch.log(min_p)[:, None]
    keys = ordered_bits(torch.where(scaled >= floor, scaled, -torch.inf))
    kept = torch.where(top_k > 0, top_k, size).clamp(max=size)
    limit = threshold(keys, torch.ones_like(keys), kept)
    inside = (scaled >= floor) & (keys >= limit)
    weights = torch.where(inside, torch.exp(scaled - scaled.amax(dim=-1, keepdim=True)), 0.0)
    # A target of 0 would be reached without any token; the best one always stays.
    mass = (top_p * weights.sum(dim=-1)).clamp(min=torch.finfo(torch.float32).tiny)
    limit = torch.where(top_p[:, None] < 1.0, torch.maximum(limit, threshold(keys, weights, mass)), limit)
    return torch.where((scaled >= floor) & (keys >= limit) | ~(scaled < torch.inf), logits, -torch.inf)


def mask_logits(logits: Tensor, allowed: Tensor) -> Tensor:
    """Logits [rows, n] as float32, with -inf at tokens that a grammar does not allow: bit i % 32 of word i // 32 of
    allowed int32 [rows, ceil(n / 32)]."""
    octets = allowed.view(torch.uint8)  # Little-endian, as words are on every device here: bit i % 8 of byte i // 8.
    bits = (octets[:, :, None] >> torch.arange(8, dtype=torch.uint8, device=allowed.device)) & 1
    return logits.float().masked_fill(bits.flatten(1)[:, : logits.shape[1]] == 0, -torch.inf)


def apply_penalties(logits: Tensor, slots: Tensor, ints: Tensor, floats: Tensor, state: SlotState) -> Tensor:
    """New logits float32 [rows, vocabulary]: those given with the rows' penalties, biases and minimum length applied.
    ints int64 [rows, len(IntColumn)] and floats float32 [rows, len(FloatColumn)]: the state of `slots` int64 [rows].

    Repetition penalty as in CTRL (arXiv:1909.05858) over prompt and output, presence and frequency penalties over the
    output, as the OpenAI API defines them.
    """
    counts = state.output_counts[slots]
    seen = state.prompt_seen[slots] | (counts > 0)
    repetition = floats[:, FloatColumn.REPETITION_PENALTY, None]
    # In place where it can be: a tensor of 64 rows and 152,000 tokens takes 39 MB, and small GPUs have little.
    found = logits * repetition
    torch.where(logits > 0, logits / repetition, found, out=found)
    torch.where(seen, found, logits, out=found)
    found -= floats[:, FloatColumn.FREQUENCY_PENALTY, None] * counts
    found -= floats[:, FloatColumn.PRESENCE_PENALTY, None] * (counts > 0)
    found.scatter_add_(1, state.bias_ids[slots], state.bias_values[slots])
    stop_ids = state.stop_ids[slots]
    early = (ints[:, IntColumn.GENERATED] < ints[:, IntColumn.MIN_TOKENS])[:, None] & (stop_ids >= 0)
    ceilings = torch.where(early, -torch.inf, torch.inf)
    return found.scatter_reduce_(1, stop_ids.clamp(min=0), ceilings, "amin")


def apply_penalties_and_filters(logits: Tensor, slots: Tensor, state: SlotState) -> Tensor:
    """Logits float32 [rows, vocabulary] of `slots` int64 [rows] with penalties applied and -inf where a filter
    excludes."""
    ints, floats = state.ints[slots], state.floats[slots]
    return filtered(apply_penalties(logits, slots, ints, floats, state), ints, floats)


def corrupt_rows(logits: Tensor) -> Tensor:
    """Rows with a NaN or an infinite logit: float [rows, vocabulary] -> bool [rows]. -inf is a token that is barred."""
    return ~(logits.amax(dim=-1) < torch.inf)


def choose(logits: Tensor, slots: Tensor, state: SlotState) -> Tensor:
    """The next token int64 [rows] of each slot, greedy or by its temperature; logits float32 [rows, vocabulary]."""
    ints, temperature = state.ints[slots], state.floats[slots, FloatColumn.TEMPERATURE]
    return sample(logits, temperature, uniform(ints[:, IntColumn.SEED], ints[:, IntColumn.GENERATED]))


def log_probabilities(logits: Tensor, tokens: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log probabilities of the model's own distribution: of each token, and of the `count` best.

    logits float32 [rows, vocabulary], tokens int64 [rows] -> float32 [rows], float32 and int64 [rows, count].
    """
    total = logits.logsumexp(dim=-1, keepdim=True)
    values, indices = logits.topk(count, dim=-1)
    return (logits.gather(1, tokens[:, None]) - total).squeeze(1), values - total, indices
