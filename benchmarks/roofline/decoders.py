"""Rooflines of a language model's decode steps and prefills, from its own weights; they may be on the device `meta`."""

from __future__ import annotations

import torch
from torch import nn

from benchmarks.roofline.gpu import FLOPS, bytes_per_second
from models.kimi_vl.language import LatentDecoder
from models.layers.decoder import CausalDecoder
from models.layers.kv_cache import STATE_INTERVAL
from models.layers.moe import chosen_experts, weight_bytes
from models.protocol import Decoder, decode_bytes
from models.qwen_vl.v3_5.language import HybridDecoder

EMBEDDINGS = ("embed_tokens.", "head.", "tied_head.")
"""Beginnings of the names of weights that are no part of a layer."""


def decode_floor(decoder: Decoder, rows: int, context: int) -> float:
    """Seconds of a step: every weight that `rows` tokens need, and their keys and values, read once; recurrent states
    read and written once."""
    return decode_bytes(decoder, rows, context, torch.bfloat16) / bytes_per_second()


def prefill_floor(decoder: Decoder, tokens: int) -> float:
    """Seconds of the layers over one prompt without cached context: the larger of its arithmetic (causal attention
    counts half of all pairs, the delta rule as in chunks) and the weights that `tokens` tokens need, read once."""
    assert isinstance(decoder, nn.Module)
    chosen = chosen_experts(decoder)
    linear = 0.0
    for name, weight in decoder.named_parameters():
        codes = name.endswith((".scale", ".zeros"))
        if weight.dim() > 1 and not codes and not name.startswith(EMBEDDINGS):
            share = chosen[id(weight)] / weight.shape[0] if id(weight) in chosen else 1.0
            in_one = 4 if weight.dtype == torch.int16 else 1  # codes of 4 bits
            linear += 2 * tokens * share * weight.numel() * in_one
    attention = len(decoder.cache_specs()) * tokens**2 * _attended_width(decoder)
    if isinstance(decoder, HybridDecoder):
        linear += tokens * _delta_flops(decoder)
    return max((linear + attention) / FLOPS, weight_bytes(decoder, tokens, EMBEDDINGS) / bytes_per_second())


def _attended_width(decoder: nn.Module) -> int:
    """Multiplications of one layer for a pair of a query and a key: widths of keys and of values, of all heads."""
    if isinstance(decoder, LatentDecoder):
        text = decoder.config
        return text.num_attention_heads * (text.qk_nope_head_dim + text.qk_rope_head_dim + text.v_head_dim)
    if isinstance(decoder, HybridDecoder):
        block = decoder.config.decoder.block
    elif isinstance(decoder, CausalDecoder):
        block = decoder.config.block
    else:
        raise TypeError(
            f"{type(decoder).__name__} has no roofline of prefills: add it to benchmarks/roofline/decoders.py"
        )
    return 2 * block.num_heads * block.head_dim


def _delta_flops(decoder: HybridDecoder) -> int:
    """Of a token in the layers with the delta rule: of its chunk two products of keys, the triangular solution and one
    product with values; of the state three products (models.layers.gated_delta.delta_chunks)."""
    delta = decoder.config.delta
    key, value = delta.key_dim, delta.value_dim
    in_chunk = STATE_INTERVAL * (4 * key + (key + value) + 2 * value)
    return len(decoder.state_specs()) * delta.value_heads * (in_chunk + 6 * key * value)
