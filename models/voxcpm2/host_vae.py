"""The AudioVAE's operations on the CPU: the references of vae_layers with channels innermost in memory.

There a pointwise convolution and a transposed one are GEMMs as they are, the samples of a transposed one come out in
order, and oneDNN's depthwise convolution needs no reordering. Shapes stay [rows, C, T]: results are views of
[rows, T, C], which the next operation takes without a copy. Rounding apart, values are those of the references.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from models.layers.precision import Precision

Memory = tuple[Tensor, Tensor]
"""Of a convolution: a table [slots, channels, pad], and the slots int64 [rows] that the rows of the signal continue."""


def residual_unit_host(
    x: Tensor,
    alpha_in: Tensor,
    depthwise_weight: Tensor,
    depthwise_bias: Tensor,
    dilation: int,
    alpha_out: Tensor,
    pointwise_weight: Tensor,
    pointwise_bias: Tensor,
    memory: Memory | None = None,
    precision: Precision | None = None,
) -> Tensor:
    """models.voxcpm2.vae_layers.residual_unit."""
    frames = _channels_last(x)
    pad = (depthwise_weight.shape[-1] - 1) * dilation
    hidden = _extended_snake(frames, alpha_in, pad, memory).transpose(1, 2)[:, :, None]
    hidden = F.conv2d(hidden, depthwise_weight[:, :, None], depthwise_bias, dilation=(1, dilation), groups=x.shape[1])
    hidden = _channels_last(hidden[:, :, 0])
    _snake(hidden, alpha_out, out=hidden)
    out = frames + pointwise_bias
    out.flatten(0, 1).addmm_(hidden.flatten(0, 1), pointwise_weight[:, :, 0].to(x.dtype).T)
    return out.transpose(1, 2)


def snake_upsample_host(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    alpha: Tensor,
    weight: Tensor,
    bias: Tensor,
    stride: int,
    memory: Memory | None = None,
    precision: Precision | None = None,
) -> Tensor:
    """models.voxcpm2.vae_layers.snake_upsample."""
    hidden = _extended_snake(torch.addcmul(shift, _channels_last(x), scale), alpha, 1, memory)
    # The module's weight lies in memory as these rows of outputs.
    taps = weight.to(x.dtype).permute(2, 1, 0).flatten(0, 1)
    now, before = F.linear(hidden, taps).unflatten(-1, (2, stride, -1)).unbind(2)
    return (now[:, 1:] + before[:, :-1]).add_(bias).flatten(1, 2).transpose(1, 2)


def _channels_last(x: Tensor) -> Tensor:
    """[rows, C, T] -> contiguous [rows, T, C]."""
    return x.transpose(1, 2).contiguous()


def _snake(x: Tensor, alpha: Tensor, out: Tensor) -> None:
    """vae_layers.snake of x [rows, T, C] into `out`, which may be x."""
    torch.addcmul(x, (x * alpha).sin_().square_(), 1.0 / (alpha + 1e-9), out=out)


def _extended_snake(x: Tensor, alpha: Tensor, pad: int, memory: Memory | None) -> Tensor:
    """vae_layers.extend_left of the snake of x [rows, T, C]."""
    rows, length, channels = x.shape
    extended = x.new_empty((rows, pad + length, channels))
    _snake(x, alpha, extended[:, pad:])
    if memory is None:
        extended[:, :pad] = 0.0
    else:
        table, slots = memory
        extended[:, :pad] = table.index_select(0, slots).transpose(1, 2)
        table.index_copy_(0, slots, extended[:, length:].transpose(1, 2))
    return extended
