"""Causal convolutions of the AudioVAE with an optional streaming conv cache, so that a stream equals one pass over the
whole signal.

A convolution's cache (`memory`) is the tail of its input, kept per slot in a table, and moves on in place. Without one
the signal starts from silence (zeros).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.layers.op import op
from models.layers.precision import Precision
from models.voxcpm2.host_vae import Memory, residual_unit_host, snake_upsample_host


@dataclass(frozen=True, eq=False)
class Streams:
    """Memory of all convolutions of one codec half: table float32 [slots, size], one row per stream, and the slots
    int64 [rows] that the signal's rows continue."""

    table: Tensor
    slots: Tensor


def extend_left(x: Tensor, pad: int, memory: Memory | None) -> Tensor:
    """x [rows, C, T] with its last `pad` earlier inputs in front."""
    if memory is None:
        return F.pad(x, (pad, 0))
    table, slots = memory
    extended = torch.cat((table.index_select(0, slots), x), dim=-1)
    table.index_copy_(0, slots, extended[..., -pad:])
    return extended


def snake(x: Tensor, alpha: Tensor) -> Tensor:
    """x + sin^2(alpha x) / (alpha + 1e-9); x [rows, C, T], alpha [C] (BigVGAN, arXiv:2206.04658)."""
    alpha = alpha[:, None]
    return x + torch.sin(alpha * x).square() / (alpha + 1e-9)


def _fits_kernels(x: Tensor, width: int) -> bool:
    return x.dtype == torch.float32 and width % 32 == 0


def _has_kernel(x: Tensor, *_: object, **__: object) -> bool:
    return _fits_kernels(x, x.shape[1])


@op(cuda="models.voxcpm2.kernels.vae:residual_unit", cpu=residual_unit_host, takes=_has_kernel)
def residual_unit(
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
    """x + pointwise(snake(depthwise(snake(x)))), causal; x [rows, C, T] -> like x.

    depthwise_weight [C, 1, kernel], pointwise_weight [C, C, 1]; memory [slots, C, (kernel - 1) * dilation] holds
    snake(x) and may be a strided view. precision: that of a GPU's GEMMs, by default as
    torch.backends.cudnn.allow_tf32 says; with float16, pointwise_weight is float16.
    """
    pad = (depthwise_weight.shape[-1] - 1) * dilation
    hidden = extend_left(snake(x, alpha_in), pad, memory)
    hidden = F.conv1d(hidden, depthwise_weight, depthwise_bias, dilation=dilation, groups=x.shape[1])
    return x + F.conv1d(snake(hidden, alpha_out), pointwise_weight.to(x.dtype), pointwise_bias)


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor, stride: int = 1, groups: int = 1, memory: Memory | None = None
) -> Tensor:
    """x [rows, C, T] -> [rows, C_out, T / stride]; memory [slots, C, kernel - stride]."""
    pad = weight.shape[-1] - stride
    if pad:
        x = extend_left(x, pad, memory)
    return F.conv1d(x, weight, bias, stride=stride, groups=groups)


@op(cuda="models.voxcpm2.kernels.vae:snake_upsample", cpu=snake_upsample_host, takes=_has_kernel)
def snake_upsample(
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
    """Transposed convolution of snake(x * scale + shift), of kernel 2 * stride: x [rows, C, T], weight
    [C, C_out, 2 * stride], scale, shift and alpha [C] -> [rows, C_out, T * stride].

    Output t reads inputs t // stride and the one before. memory [slots, C, 1] holds the snake's last output.
    precision as of residual_unit.
    """
    x = snake(x * scale[:, None] + shift[:, None], alpha)
    out = F.conv_transpose1d(extend_left(x, 1, memory), weight.to(x.dtype), bias, stride=stride)
    return out[..., stride:-stride]


@op(
    cuda="models.voxcpm2.kernels.vae:snake_samples",
    takes=lambda x, alpha, weight, *_, **__: _has_kernel(x) and weight.shape[-1] == 7,
)
def snake_samples(x: Tensor, alpha: Tensor, weight: Tensor, bias: Tensor, memory: Memory | None = None) -> Tensor:
    """tanh of a causal convolution of snake(x) to one channel: x [rows, C, T], alpha [C], weight [1, C, kernel] ->
    [rows, 1, T]. memory [slots, C, kernel - 1] holds snake(x)."""
    return torch.tanh(causal_conv(snake(x, alpha), weight, bias, memory=memory))


@op(cuda="models.voxcpm2.kernels.vae:channel_gemm")
def channel_gemm(
    hidden: Tensor, weight: Tensor, bias: Tensor, x: Tensor | None, out: Tensor, outputs: int, precision: Precision
) -> None:
    """The GEMM over channels of a residual unit and of a transposed convolution, into `out`: an operation of its own,
    since what runs before it moves the memory on.

    hidden [rows, T, inputs] times weight [outputs, inputs], plus x; without x a transposed convolution of two taps:
    hidden has one sample more, weight [2, outputs, inputs] a part for a sample and one for the sample before.
    """
    hidden, weight = hidden.float(), weight.float()
    if x is not None:
        result = F.linear(hidden, weight.reshape(outputs, -1)) + bias + x
    else:
        now, before = weight.reshape(2, outputs, -1)
        result = F.linear(hidden[:, 1:], now) + F.linear(hidden[:, :-1], before)
        result = result.unflatten(-1, (-1, bias.shape[0])) + bias
    out.copy_(result.reshape(out.shape))


class CausalConv(nn.Module):
    """Weights of a causal convolution; `offset` is where its memory begins in a row of Streams.table."""

    def __init__(self, width: int, out_features: int, kernel: int, *, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.width, self.stride, self.groups = width, stride, groups
        self.pad = kernel - stride
        self.offset = 0
        self.weight = nn.Parameter(torch.empty(out_features, width // groups, kernel))
        self.bias = nn.Parameter(torch.empty(out_features))

    def forward(self, x: Tensor, streams: Streams | None = None) -> Tensor:
        return causal_conv(x, self.weight, self.bias, self.stride, self.groups, memory_of(self, streams))


class _Operand:
    """The precision of a module's GEMM on a GPU, and the copy of its weight for that."""

    def __init__(self) -> None:
        self.precision: Precision | None = None
        self._half: Tensor | None = None

    def choose(self, precision: Precision | None, weight: Tensor) -> None:
        """Sets the precision, and copies a weight that it wants in 16 bits."""
        self.precision = precision
        half = precision == "float16" and weight.is_cuda and _fits_kernels(weight, weight.shape[0])
        # clamp_ keeps the memory layout, which the kernels depend on.
        self._half = weight.detach().clone().clamp_(-65504.0, 65504.0).half() if half else None

    def of(self, weight: Tensor) -> tuple[Tensor, Precision | None]:
        """What the GEMM reads of the weight, and its precision."""
        return weight if self._half is None else self._half, self.precision


class SnakeUpsample(nn.Module):
    """Rate condition (scale and shift: the row of the baked sample rate), snake and causal transposed convolution."""

    pad = 1

    def __init__(self, width: int, out_features: int, stride: int) -> None:
        super().__init__()
        self.width, self.stride = width, stride
        self.offset = 0
        self.scale = nn.Parameter(torch.empty(width))
        self.shift = nn.Parameter(torch.empty(width))
        self.alpha = nn.Parameter(torch.empty(width))
        # Input channels are innermost in memory, so that the kernel's GEMM reads them in wide loads.
        self.weight = nn.Parameter(torch.empty(2 * stride, out_features, width).permute(2, 1, 0))
        self.bias = nn.Parameter(torch.empty(out_features))
        self.operand = _Operand()

    def forward(self, x: Tensor, streams: Streams | None = None) -> Tensor:
        weight, precision = self.operand.of(self.weight)
        conditioned, memory = (self.scale, self.shift, self.alpha), memory_of(self, streams)
        return snake_upsample(x, *conditioned, weight, self.bias, self.stride, memory, precision)


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
            memory_of(self, streams),
            precision,
        )


def memory_of(layer: CausalConv | SnakeUpsample | ResidualUnit, streams: Streams | None) -> Memory | None:
    """The layer's memory, a view into the table; None without streams."""
    if streams is None:
        return None
    width, pad = layer.width, layer.pad
    return streams.table[:, layer.offset : layer.offset + width * pad].unflatten(1, (width, pad)), streams.slots
