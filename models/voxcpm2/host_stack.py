"""A local stack on the CPU: models.layers.block.run_blocks for a few short sequences in float32, where the GEMMs of a
layer take no longer than the operations between them. Queries and keys are rotated together, and no operation is
dispatched through Python.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from models.layers.block import Block
from models.layers.lora import StackLora, add_lora
from models.layers.mlp import SwiGLU
from models.layers.norms import RMSNorm, rms_norm_float32


def run_local_host(
    blocks: Sequence[Block],
    final_norm: RMSNorm,
    tokens: Tensor,
    normed: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    kept: slice,
    lora: StackLora | None = None,
) -> Tensor:
    """Tokens float32 [N, L, h] through blocks without biases -> their final norm at the tokens `kept`, [N, kept, h].

    normed: the tokens after the first block's attention_norm, from a caller that has them. cos and sin float32
    [L, head_dim / 2]: the tokens attend to each other, rotated half-split.
    """
    sequences, length, _ = tokens.shape
    cosines, sines = torch.cat((cos, cos), dim=-1)[:, None], torch.cat((-sin, sin), dim=-1)[:, None]
    x, last = tokens.flatten(0, 1), blocks[-1]
    given = None if normed is None else normed.flatten(0, 1)
    for index, block in enumerate(blocks):
        attention, mlp, norms = block.attention, block.mlp, (block.attention_norm, block.mlp_norm)
        assert isinstance(mlp, SwiGLU)
        heads, kv_heads, width = attention.config.num_heads, attention.config.num_kv_heads, attention.config.head_dim
        read = rms_norm_float32(x, norms[0].weight, norms[0].eps) if given is None else given
        given = None
        qkv = F.linear(read, attention.qkv.weight)
        if lora is not None:
            add_lora(qkv, read, lora.layers[index].qkv, lora.rows)
        qkv = qkv.view(sequences, length, -1, width)
        turned = qkv[:, :, : heads + kv_heads]
        # The halves exchanged, with the sign of the sine in its table.
        turned = torch.roll(turned, width // 2, -1).mul_(sines).addcmul_(turned, cosines)
        q, k, v = turned[:, :, :heads], turned[:, :, heads:], qkv[:, :, heads + kv_heads :]
        if block is last:
            q, x = q[:, kept], x.unflatten(0, (sequences, length))[:, kept].flatten(0, 1)
        attended = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), enable_gqa=heads != kv_heads
        )
        attended = attended.transpose(1, 2).reshape(x.shape[0], -1)
        out = F.linear(attended, attention.out.weight)
        if lora is not None:
            add_lora(out, attended, lora.layers[index].out, lora.rows)
        x = out.add_(x)
        read = rms_norm_float32(x, norms[1].weight, norms[1].eps)
        gate, up = F.linear(read, mlp.gate_up.weight).chunk(2, dim=-1)
        x = F.linear(F.silu(gate).mul_(up), mlp.down.weight).add_(x)
    return rms_norm_float32(x, final_norm.weight, final_norm.eps).unflatten(0, (sequences, -1))
