"""The AudioVAE's operations on the CPU: the references of vae_layers with channels innermost in memory.

There a pointwise convolution and a transposed one are GEMMs as they are, the samples of a transposed one come out in
order, and oneDNN's depthwise convolution needs no reordering. Shapes stay [rows, C, T]: results are views of
[rows, T, C], which the next operation takes without a copy. Rounding apart, values are those of the references.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from models.layers.precision import Precision

_NARROW = 32


def residual_unit_host(
    x: Tensor,
    alpha_in: Tensor,
    depthwise_weight: Tensor,
    depthwise_bias: Tensor,
    dilation: int,
    alpha_out: Tensor,
    pointwise_weight: Tensor,
    pointwise_bias: Tensor,
    memory: Tensor | None = None,
    slots: Tensor | None = None,
    precision: Precision | None = None,
) -> Tensor:
    """models.voxcpm2.vae_layers.residual_unit."""
    frames = _channels_last(x)
    pad = (depthwise_weight.shape[-1] - 1) * dilation
    hidden = _extend_left(_snake(frames, alpha_in), pad, memory, slots).transpose(1, 2)[:, :, None]
    hidden = F.conv2d(hidden, depthwise_weight[:, :, None], depthwise_bias, dilation=(1, dilation), groups=x.shape[1])
    hidden = _snake(_channels_last(hidden[:, :, 0]), alpha_out)
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
    memory: Tensor | None = None,
    slots: Tensor | None = None,
    precision: Precision | None = None,
) -> Tensor:
    """models.voxcpm2.vae_layers.snake_upsample."""
    hidden = _extend_left(_snake(torch.addcmul(shift, _channels_last(x), scale), alpha), 1, memory, slots)
    # The module's weight lies in memory as these rows of outputs.
    taps = weight.to(x.dtype).permute(2, 1, 0).flatten(0, 1)
    now, before = F.linear(hidden, taps).unflatten(-1, (2, stride, -1)).unbind(2)
    return (now[:, 1:] + before[:, :-1]).add_(bias).flatten(1, 2).transpose(1, 2)


def snake_samples_host(
    x: Tensor,
    alpha: Tensor,
    weight: Tensor,
    bias: Tensor,
    memory: Tensor | None = None,
    slots: Tensor | None = None,
) -> Tensor:
    """models.voxcpm2.vae_layers.snake_samples."""
    kernel = weight.shape[-1]
    hidden = _extend_left(_snake(_channels_last(x), alpha), kernel - 1, memory, slots)
    # Each frame's share in each of the samples that it reaches; a sample adds up a diagonal of them.
    shares, length = (hidden @ weight[0]).transpose(1, 2).contiguous(), x.shape[-1]
    out = shares[:, 0, :length] + bias
    for tap in range(1, kernel):
        out += shares[:, tap, tap : tap + length]
    return torch.tanh_(out)[:, None]


def _channels_last(x: Tensor) -> Tensor:
    """[rows, C, T] -> contiguous [rows, T, C]."""
    return x.transpose(1, 2).contiguous()


def _snake(x: Tensor, alpha: Tensor) -> Tensor:
    """vae_layers.snake of x contiguous [rows, T, C]."""
    # Rows of a few channels are short loops: several make one.
    together = math.gcd(x.shape[0] * x.shape[1], 32) if alpha.shape[0] <= _NARROW else 1
    alpha = alpha.repeat(together)
    wide = x.view(-1, alpha.shape[0])
    return torch.addcmul(wide, (wide * alpha).sin_().square_(), 1.0 / (alpha + 1e-9)).view(x.shape)


def _extend_left(x: Tensor, pad: int, memory: Tensor | None, slots: Tensor | None) -> Tensor:
    """vae_layers.extend_left of x [rows, T, C]; memory [slots, C, pad]."""
    if memory is None or slots is None:
        return F.pad(x, (0, 0, pad, 0))
    extended = torch.cat((memory.index_select(0, slots).transpose(1, 2), x), dim=1)
    memory.index_copy_(0, slots, extended[:, -pad:].transpose(1, 2))
    return extended
