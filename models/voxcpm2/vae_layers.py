"""Causal convolutions of the AudioVAE with an optional memory, so that a stream equals one pass over the whole signal.

A convolution's memory is the tail of its input, kept per slot in a table [slots, channels, pad]. Without a table the
signal starts from silence (zeros).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers.precision import Precision


@dataclass(frozen=True, eq=False)
class Streams:
    """Memory of all convolutions of one codec half: table float32 [slots, size], one row per stream, and the slots
    int64 [rows] that the signal's rows continue."""

    table: Tensor
    slots: Tensor

    def view(self, offset: int, channels: int, pad: int) -> Tensor:
        """[slots, channels, pad], a view into the table."""
        return self.table[:, offset : offset + channels * pad].unflatten(1, (channels, pad))


def extend_left(x: Tensor, pad: int, memory: Tensor | None, slots: Tensor | None) -> Tensor:
    """x [rows, C, T] with its last `pad` earlier inputs in front; memory [slots, C, pad] moves on in place."""
    if memory is None or slots is None:
        return F.pad(x, (pad, 0))
    extended = torch.cat((memory.index_select(0, slots), x), dim=-1)
    memory.index_copy_(0, slots, extended[..., -pad:])
    return extended


def snake(x: Tensor, alpha: Tensor) -> Tensor:
    """x + sin^2(alpha x) / (alpha + 1e-9); x [rows, C, T], alpha [C] (BigVGAN, arXiv:2206.04658)."""
    alpha = alpha[:, None]
    return x + torch.sin(alpha * x).square() / (alpha + 1e-9)


def _has_kernel(x: Tensor, width: int) -> bool:
    return x.is_cuda and x.dtype == torch.float32 and width % 32 == 0


def residual_unit(
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
    """x + pointwise(snake(depthwise(snake(x)))), causal; x [rows, C, T] -> like x.

    depthwise_weight [C, 1, kernel], pointwise_weight [C, C, 1]; memory [slots, C, (kernel - 1) * dilation] holds
    snake(x), moves on in place for the rows' slots and may be a strided view. precision: of a GPU's products, by
    default as torch.backends.cudnn.allow_tf32 says; with float16, pointwise_weight is float16.
    """
    rest = (depthwise_weight, depthwise_bias, dilation, alpha_out, pointwise_weight, pointwise_bias, memory, slots)
    if _has_kernel(x, x.shape[1]):
        from models.layers.kernels.vae import residual_unit_cuda

        return residual_unit_cuda(x, alpha_in, *rest, precision=precision)
    return residual_unit_reference(x, alpha_in, *rest)


def residual_unit_reference(
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
) -> Tensor:
    pad = (depthwise_weight.shape[-1] - 1) * dilation
    hidden = extend_left(snake(x, alpha_in), pad, memory, slots)
    hidden = F.conv1d(hidden, depthwise_weight, depthwise_bias, dilation=dilation, groups=x.shape[1])
    return x + F.conv1d(snake(hidden, alpha_out), pointwise_weight, pointwise_bias)


def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    stride: int = 1,
    groups: int = 1,
    memory: Tensor | None = None,
    slots: Tensor | None = None,
) -> Tensor:
    """x [rows, C, T] -> [rows, C_out, T / stride]; memory [slots, C, kernel - stride]."""
    pad = weight.shape[-1] - stride
    if pad:
        x = extend_left(x, pad, memory, slots)
    return F.conv1d(x, weight, bias, stride=stride, groups=groups)


def snake_upsample(
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
    """Transposed convolution of snake(x * scale + shift), of kernel 2 * stride: x [rows, C, T], weight
    [C, C_out, 2 * stride], scale, shift and alpha [C] -> [rows, C_out, T * stride].

    Output t reads inputs t // stride and the one before. memory [slots, C, 1] holds the snake's last output.
    precision as of residual_unit.
    """
    if _has_kernel(x, x.shape[1]):
        from models.layers.kernels.vae import snake_upsample_cuda

        return snake_upsample_cuda(x, scale, shift, alpha, weight, bias, stride, memory, slots, precision=precision)
    return snake_upsample_reference(x, scale, shift, alpha, weight, bias, stride, memory, slots)


def snake_upsample_reference(
    x: Tensor,
    scale: Tensor,
    shift: Tensor,
    alpha: Tensor,
    weight: Tensor,
    bias: Tensor,
    stride: int,
    memory: Tensor | None = None,
    slots: Tensor | None = None,
) -> Tensor:
    x = snake(x * scale[:, None] + shift[:, None], alpha)
    out = F.conv_transpose1d(extend_left(x, 1, memory, slots), weight, bias, stride=stride)
    return out[..., stride:-stride]


def snake_samples(
    x: Tensor,
    alpha: Tensor,
    weight: Tensor,
    bias: Tensor,
    memory: Tensor | None = None,
    slots: Tensor | None = None,
) -> Tensor:
    """tanh of a causal convolution of snake(x) to one channel: x [rows, C, T], alpha [C], weight [1, C, kernel] ->
    [rows, 1, T]. memory [slots, C, kernel - 1] holds snake(x)."""
    if _has_kernel(x, x.shape[1]) and weight.shape[-1] == 7:
        from models.layers.kernels.vae import snake_samples_cuda

        return snake_samples_cuda(x, alpha, weight, bias, memory, slots)
    return snake_samples_reference(x, alpha, weight, bias, memory, slots)


def snake_samples_reference(
    x: Tensor,
    alpha: Tensor,
    weight: Tensor,
    bias: Tensor,
    memory: Tensor | None = None,
    slots: Tensor | None = None,
) -> Tensor:
    return torch.tanh(causal_conv(snake(x, alpha), weight, bias, memory=memory, slots=slots))


class CausalConv(nn.Module):
    """Weights of a causal convolution; `offset` is where its memory begins in a row of Streams.table."""

    def __init__(self, width: int, out_width: int, kernel: int, *, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.width, self.stride, self.groups = width, stride, groups
        self.pad = kernel - stride
        self.offset = 0
        self.weight = nn.Parameter(torch.empty(out_width, width // groups, kernel))
        self.bias = nn.Parameter(torch.empty(out_width))

    def forward(self, x: Tensor, streams: Streams | None = None) -> Tensor:
        memory = streams.view(self.offset, self.width, self.pad) if streams is not None else None
        slots = streams.slots if streams is not None else None
        return causal_conv(x, self.weight, self.bias, self.stride, self.groups, memory, slots)


class _Operand:
    """How a module's product is done on a GPU, and its weight's copy for that."""

    def __init__(self) -> None:
        self.precision: Precision | None = None
        self._half: Tensor | None = None

    def choose(self, precision: Precision | None, weight: Tensor) -> None:
        self.precision = precision
        half = precision == "float16" and _has_kernel(weight, weight.shape[0])
        # clamp_ keeps the order in memory, which the kernels read.
        self._half = weight.detach().clone().clamp_(-65504.0, 65504.0).half() if half else None

    def of(self, weight: Tensor) -> tuple[Tensor, Precision | None]:
        return weight if self._half is None else self._half, self.precision


class SnakeUpsample(nn.Module):
    """Rate condition (scale and shift: the row of the baked sample rate), snake and causal transposed convolution."""

    pad = 1

    def __init__(self, width: int, out_width: int, stride: int) -> None:
        super().__init__()
        self.width, self.stride = width, stride
        self.offset = 0
        self.scale = nn.Parameter(torch.empty(width))
        self.shift = nn.Parameter(torch.empty(width))
        self.alpha = nn.Parameter(torch.empty(width))
        # Input channels lie innermost in memory: the kernel's products read them in wide loads.
        self.weight = nn.Parameter(torch.empty(2 * stride, out_width, width).permute(2, 1, 0))
        self.bias = nn.Parameter(torch.empty(out_width))
        self.operand = _Operand()

    def forward(self, x: Tensor, streams: Streams | None = None) -> Tensor:
        memory = streams.view(self.offset, self.width, 1) if streams is not None else None
        slots = streams.slots if streams is not None else None
        weight, precision = self.operand.of(self.weight)
        conditioned = (self.scale, self.shift, self.alpha)
        return snake_upsample(x, *conditioned, weight, self.bias, self.stride, memory, slots, precision)


class ResidualUnit(nn.Module):
    """Depthwise and pointwise convolution around two snakes, added to the input."""

    kernel = 7

    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.width, self.dilation = width, dilation
        self.pad = (self.kernel - 1) * dilation
        self.offset = 0
        self.alpha_in = nn.Parameter(torch.empty(width))
        self.depthwise_weight = nn.Parameter(torch.empty(width, 1, self.kernel))
        self.depthwise_bias = nn.Parameter(torch.empty(width))
        self.alpha_out = nn.Parameter(torch.empty(width))
        self.pointwise_weight = nn.Parameter(torch.empty(width, width, 1))
        self.pointwise_bias = nn.Parameter(torch.empty(width))
        self.operand = _Operand()

    def forward(self, x: Tensor, streams: Streams | None = None) -> Tensor:
        memory = streams.view(self.offset, self.width, self.pad) if streams is not None else None
        slots = streams.slots if streams is not None else None
        pointwise_weight, precision = self.operand.of(self.pointwise_weight)
        return residual_unit(
            x,
            self.alpha_in,
            self.depthwise_weight,
            self.depthwise_bias,
            self.dilation,
            self.alpha_out,
            pointwise_weight,
            self.pointwise_bias,
            memory,
            slots,
            precision,
        )
