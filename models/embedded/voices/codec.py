"""The AudioVAE as it is trained: gradients, weight norm in its published two parts, published parameter names."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_DILATIONS = (1, 3, 9)


def _snake_forward(x: Tensor, alpha: Tensor) -> Tensor:
    return (x + torch.sin(alpha * x).square() / (alpha + 1e-9)).to(x.dtype)


def _snake_backward(gradient: Tensor, x: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
    turned, below = (alpha * x).float(), alpha + 1e-9
    slope, sine = torch.sin(2.0 * turned), torch.sin(turned)
    of_alpha = gradient * (x * slope - sine.square() / below) / below
    return (gradient * (1.0 + slope)).to(x.dtype), of_alpha.sum((0, 2), keepdim=True, dtype=torch.float32)


class _Snake(torch.autograd.Function):
    """Written out, so that two plain functions without a graph are compiled, once for all layers."""

    forward_of, backward_of = staticmethod(_snake_forward), staticmethod(_snake_backward)

    @staticmethod
    def forward(ctx: Any, x: Tensor, alpha: Tensor) -> Tensor:
        x, alpha = x.detach(), alpha.detach()
        ctx.save_for_backward(x, alpha)
        return _Snake.forward_of(x, alpha)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, alpha = ctx.saved_tensors
        return _Snake.backward_of(gradients[0].contiguous(), x, alpha)


def compile_snakes() -> None:
    """For the rest of the process."""
    _Snake.forward_of = staticmethod(torch.compile(_snake_forward, dynamic=True))
    _Snake.backward_of = staticmethod(torch.compile(_snake_backward, dynamic=True))


class Snake(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1, width, 1))

    def forward(self, x: Tensor) -> Tensor:
        return _Snake.apply(x, self.alpha)


class Conv(nn.Module):
    """Causal convolution, or the transposed one whose last samples are cut off (`up`).

    shifts: compute depthwise ones as sums of shifted products; which way is faster depends on the machine."""

    shifts = False

    def __init__(
        self,
        width: int,
        out: int,
        kernel: int,
        *,
        stride: int = 1,
        dilation: int = 1,
        groups: int = 1,
        up: bool = False,
    ) -> None:
        super().__init__()
        self.stride, self.dilation, self.groups, self.up = stride, dilation, groups, up
        shape = (width, out, kernel) if up else (out, width // groups, kernel)
        fan_in = width * 2 if up else width // groups * kernel
        self.weight_v = nn.Parameter(torch.randn(shape) * fan_in**-0.5)
        self.weight_g = nn.Parameter(self.weight_v.detach().flatten(1).norm(dim=1)[:, None, None].clone())
        self.bias = nn.Parameter(torch.zeros(out))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight_g * F.normalize(self.weight_v.flatten(1), dim=1).view_as(self.weight_v)
        if self.up:
            return F.conv_transpose1d(x, weight, self.bias, stride=self.stride)[..., : -self.stride]
        pad = (weight.shape[-1] - 1) * self.dilation if self.stride == 1 else weight.shape[-1] - self.stride
        x = F.pad(x, (pad, 0))
        if self.groups > 1 and Conv.shifts:
            return shifted(x, weight.to(x.dtype), self.bias.to(x.dtype), self.dilation)
        return F.conv1d(x, weight, self.bias, stride=self.stride, dilation=self.dilation, groups=self.groups)


class Unit(nn.Module):
    def __init__(self, width: int, dilation: int) -> None:
        super().__init__()
        self.block = nn.Sequential(
            Snake(width), Conv(width, width, 7, dilation=dilation, groups=width), Snake(width), Conv(width, width, 1)
        )
        self.block[3].weight_g.data.mul_(0.5)  # type: ignore[operator]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.block(x)


def shifted(x: Tensor, weight: Tensor, bias: Tensor, dilation: int) -> Tensor:
    """A depthwise convolution as a sum of products."""
    taps = weight.shape[-1]
    length = x.shape[-1] - (taps - 1) * dilation
    out = bias[:, None] + weight[:, 0, :1] * x[..., :length]
    for tap in range(1, taps):
        out = out + weight[:, 0, tap : tap + 1] * x[..., tap * dilation : tap * dilation + length]
    return out


class _Down(nn.Module):
    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        units = [Unit(width, dilation) for dilation in _DILATIONS]
        self.block = nn.Sequential(*units, Snake(width), Conv(width, 2 * width, 2 * stride, stride=stride))

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


class _Up(nn.Module):
    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        units = [Unit(width // 2, dilation) for dilation in _DILATIONS]
        self.block = nn.Sequential(Snake(width), Conv(width, width // 2, 2 * stride, stride=stride, up=True), *units)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


class _Condition(nn.Module):
    """Scale and shift for each output bandwidth; the last one is trained, and the others become like it."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.scale_embed = nn.Embedding.from_pretrained(torch.ones(rows, width), freeze=False)
        self.bias_embed = nn.Embedding.from_pretrained(torch.zeros(rows, width), freeze=False)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale_embed.weight[-1][:, None] + self.bias_embed.weight[-1][:, None]


class Encoder(nn.Module):
    """Samples [N, 1, T] at 16 kHz -> latents [N, D, T / 640]."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width = config["encoder_dim"]
        blocks: list[nn.Module] = [Conv(1, width, 7)]
        # Speech is far below 1: as it comes, the snakes would see nothing but a straight line.
        blocks[0].weight_g.data.mul_(10.0)  # type: ignore[operator]
        for stride in config["encoder_rates"]:
            blocks.append(_Down(width, stride))
            width *= 2
        self.block = nn.Sequential(*blocks)
        self.fc_mu = Conv(width, config["latent_dim"], 3)
        self.fc_mu.weight_g.data.mul_(0.1)
        self.fc_logvar = Conv(width, config["latent_dim"], 3)

    def forward(self, wave: Tensor) -> Tensor:
        return self.fc_mu(self.block(wave))


class Decoder(nn.Module):
    """Latents [N, D, T] -> samples [N, 1, T * 1920] at 48 kHz."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        latent, width, rates = config["latent_dim"], config["decoder_dim"], config["decoder_rates"]
        model: list[nn.Module] = [Conv(latent, latent, 7, groups=latent), Conv(latent, width, 1)]
        conditions: dict[str, nn.Module] = {}
        for index, stride in enumerate(rates, start=2):
            conditions[str(index)] = _Condition(len(config["sr_bin_boundaries"]) + 1, width)
            model.append(_Up(width, stride))
            width //= 2
        model += [Snake(width), Conv(width, 1, 7)]
        model[-1].weight_g.data.mul_(0.02)  # type: ignore[operator]
        self.model = nn.ModuleList(model)
        self.sr_cond_model = nn.ModuleDict(conditions)
        self.register_buffer("sr_bin_boundaries", torch.tensor(config["sr_bin_boundaries"], dtype=torch.int32))

    def forward(self, latents: Tensor) -> Tensor:
        return torch.tanh(self.layers(latents, len(self.model)).float())

    def layers(self, x: Tensor, count: int) -> Tensor:
        """What the first `count` of them make of latents."""
        for index in range(count):
            if str(index) in self.sr_cond_model:
                x = self.sr_cond_model[str(index)](x)
            x = self.model[index](x)
        return x


class Head(nn.Module):
    """Stands for the decoder's last stage, the costliest, for most of the training: samples at 16 kHz, EARLY samples
    at 48 kHz before their time. `hand_over` makes the stage do what the head did."""

    EARLY = 5
    """Samples at 48 kHz that the interpolation by `hand_over` takes."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self._layers = len(decoder.model) - 3
        width = decoder.model[-3].block[0].alpha.shape[1]  # type: ignore[union-attr,index]
        self.out = nn.Conv1d(width, 1, 1)
        nn.init.normal_(self.out.weight, std=0.02 * width**-0.5)
        nn.init.zeros_(self.out.bias)  # type: ignore[arg-type]

    def forward(self, decoder: Decoder, latents: Tensor) -> Tensor:
        """[N, D, T] -> [N, 1, T * 640]."""
        x = decoder.layers(latents, self._layers)
        with torch.autocast(x.device.type, enabled=False):
            return torch.tanh(self.out(x.float()))

    @torch.no_grad()
    def hand_over(self, decoder: Decoder) -> None:
        """A windowed sinc of 12 taps: 6 by the transposed convolution of every other channel, 6 by that of the
        channels between, which the last convolution delays. Snakes and units let everything pass at first."""
        up, snake, last = decoder.model[-3], decoder.model[-2], decoder.model[-1]
        places = torch.arange(12, device=self.out.weight.device) - self.EARLY
        taps = torch.sinc(places / 3.0) * torch.cos(places * (torch.pi / 14.0)).square() * (places <= self.EARLY)
        taps = taps * (3.0 / taps.sum())
        width = int(last.weight_v.shape[1])  # type: ignore[index]
        signs = torch.ones(width, device=taps.device)
        signs[width // 2 :] = -1.0
        halves = taps.view(2, 6).repeat(width // 2, 1) * signs[:, None]
        _fill(up.block[1], self.out.weight.view(-1, 1, 1) * halves)  # type: ignore[index,arg-type]
        up.block[1].bias.zero_()  # type: ignore[union-attr,index]
        weight = torch.zeros(1, width, 7, device=taps.device)
        weight[0, ::2, -1], weight[0, 1::2, 0] = signs[::2] * 2.0 / width, signs[1::2] * 2.0 / width
        _fill(last, weight)  # type: ignore[arg-type]
        last.bias.copy_(self.out.bias)  # type: ignore[operator,arg-type]
        for alpha in (up.block[0].alpha, snake.alpha):  # type: ignore[union-attr,index]
            alpha.fill_(1e-3)  # type: ignore[operator]
        for unit in list(up.block)[2:]:  # type: ignore[arg-type]
            unit.block[3].weight_g.zero_()
            unit.block[3].bias.zero_()


def _fill(conv: Conv, weight: Tensor) -> None:
    conv.weight_v.copy_(weight)
    conv.weight_g.copy_(weight.flatten(1).norm(dim=1)[:, None, None])


class Codec(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)


def published(codec: Codec) -> dict[str, Tensor]:
    """audiovae.safetensors: float16, every bandwidth like the last."""
    tensors = {}
    for name, tensor in codec.state_dict().items():
        if name.startswith("decoder.sr_cond_model."):
            tensor = tensor[-1:].expand_as(tensor)
        tensors[name] = tensor.contiguous() if tensor.dtype == torch.int32 else tensor.half().contiguous()
    return tensors
