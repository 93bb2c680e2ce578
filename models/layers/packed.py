"""Element-wise chains over packed rows, each one function so that each is one kernel on a GPU.

The plain twins here say what is computed; CUDA runs models/layers/kernels/packed.py.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers.rotary import rotate_half_split


def layer_norm(x: Tensor, norm: nn.LayerNorm) -> Tensor:
    """[n, width] -> like x; float32 statistics, one rounding."""
    if x.is_cuda:
        from models.layers.kernels.packed import add_layer_norm_cuda

        return add_layer_norm_cuda(x, None, norm.weight, norm.bias, norm.eps)
    return F.layer_norm(x, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


def add_layer_norm(x: Tensor, residual: Tensor, norm: nn.LayerNorm) -> Tensor:
    """residual += x, then its norm: both [n, width]; the sum is rounded to the dtype before its norm."""
    if x.is_cuda:
        from models.layers.kernels.packed import add_layer_norm_cuda

        return add_layer_norm_cuda(x, residual, norm.weight, norm.bias, norm.eps)
    residual += x
    return F.layer_norm(residual, norm.normalized_shape, norm.weight, norm.bias, norm.eps)


def rotate_packed(qkv: Tensor, num_heads: int, cos: Tensor, sin: Tensor) -> None:
    """rotate_half_split of the first `num_heads` heads (queries and keys) of qkv [n, heads, D], in place.

    cos and sin float32 [n, D/2].
    """
    if qkv.is_cuda:
        from models.layers.kernels.packed import rotate_packed_cuda

        rotate_packed_cuda(qkv, num_heads, cos, sin)
        return
    turned = qkv[:, :num_heads]
    turned.copy_(rotate_half_split(turned, cos, sin))


def linear_quick_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """y * sigmoid(1.702 y) of y = F.linear(x, weight, bias), x [n, k]."""
    if x.is_cuda:
        from models.layers.kernels.linear import linear_quick_gelu_cuda
        from models.layers.kernels.packed import add_quick_gelu_cuda
        from models.layers.kernels.routes import route

        if chosen := route("quick_gelu", x, weight):
            return linear_quick_gelu_cuda(x, weight, bias, chosen.tile)
        return add_quick_gelu_cuda(F.linear(x, weight), bias)
    y = F.linear(x, weight, bias)
    return y * torch.sigmoid(1.702 * y)


def byte_lookup(pixels: Tensor, table: Tensor) -> Tensor:
    """table[channel, byte] of uint8 pixels [n, channels * values], one channel after the other -> table's dtype.

    table [channels, 256]. A single channel's table serves pixels in any order of channels.
    """
    if pixels.is_cuda:
        from models.layers.kernels.packed import byte_lookup_cuda

        return byte_lookup_cuda(pixels, table)
    channels = table.shape[0]
    offsets = torch.arange(0, 256 * channels, 256, dtype=torch.int32, device=pixels.device)
    index = pixels.unflatten(1, (channels, -1)).int() + offsets[:, None]
    return table.flatten().index_select(0, index.flatten()).view(pixels.shape)
