"""AudioVAE V2: 16 kHz speech to latent frames and latent frames to 48 kHz speech, causal throughout.

Inference only: weight norm is folded into plain weights at load, the latent is the mean, and the decoder's
sample-rate condition is baked in for one output bandwidth. Float32, as published.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction

import torch
from torch import Tensor, nn

from models.layers.precision import Precision
from models.voxcpm2.config import AudioVAEConfig
from models.voxcpm2.vae_layers import CausalConv, ResidualUnit, SnakeUpsample, Streams, memory_of, snake, snake_samples

_DILATIONS = (1, 3, 9)
_ENCODE_SECONDS = 4
"""Seconds of reference audio that are encoded at a time: a minute at once would take gigabytes."""


class EncoderBlock(nn.Module):
    """Three residual units, then a convolution that divides the rate by `stride` and doubles the width: [rows, C, T] ->
    [rows, 2 C, T / stride]."""

    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        self.units = nn.ModuleList(ResidualUnit(width, dilation) for dilation in _DILATIONS)
        self.alpha = nn.Parameter(torch.empty(width))
        self.down = CausalConv(width, 2 * width, 2 * stride, stride=stride)

    def forward(self, x: Tensor, streams: Streams | None) -> Tensor:
        for unit in self.units:
            x = unit(x, streams)
        return self.down(snake(x, self.alpha), streams)


class DecoderBlock(nn.Module):
    """A transposed convolution that multiplies the rate by `stride` and halves the width, then three residual units:
    [rows, C, T] -> [rows, C / 2, T * stride]."""

    def __init__(self, width: int, stride: int) -> None:
        super().__init__()
        self.up = SnakeUpsample(width, width // 2, stride)
        self.units = nn.ModuleList(ResidualUnit(width // 2, dilation) for dilation in _DILATIONS)

    def forward(self, x: Tensor, streams: Streams | None) -> Tensor:
        x = self.up(x, streams)
        for unit in self.units:
            x = unit(x, streams)
        return x


class Encoder(nn.Module):
    """Samples [rows, 1, T], T a multiple of the hop -> latent frames [rows, latent_dim, T / hop]."""

    def __init__(self, config: AudioVAEConfig) -> None:
        super().__init__()
        widths = [config.encoder_dim * 2**i for i in range(len(config.encoder_rates) + 1)]
        self.first = CausalConv(1, widths[0], 7)
        self.blocks = nn.ModuleList(map(EncoderBlock, widths, config.encoder_rates))
        self.mean = CausalConv(widths[-1], config.latent_dim, 3)
        self.memory_size = _lay_out(self)

    def forward(self, x: Tensor, streams: Streams | None = None) -> Tensor:
        x = self.first(x, streams)
        for block in self.blocks:
            x = block(x, streams)
        return self.mean(x, streams)


class CodecDecoder(nn.Module):
    """Latent frames [rows, latent_dim, T] -> samples [rows, 1, T * hop]. With streams, the rows continue theirs.

    precision: that of the GEMMs on a GPU; None: as torch.backends.cudnn.allow_tf32 says."""

    precision: Precision | None = None

    def __init__(self, config: AudioVAEConfig) -> None:
        super().__init__()
        latent, widths = config.latent_dim, [config.decoder_dim >> i for i in range(len(config.decoder_rates) + 1)]
        self.first = CausalConv(latent, latent, 7, groups=latent)
        self.widen = CausalConv(latent, widths[0], 1)
        self.blocks = nn.ModuleList(map(DecoderBlock, widths, config.decoder_rates))
        self.alpha = nn.Parameter(torch.empty(widths[-1]))
        self.last = CausalConv(widths[-1], 1, 7)
        self.memory_size = _lay_out(self)
        self.memory_frames = self._past_frames()
        """Latent frames before the current one on which samples depend."""

    def _past_frames(self) -> int:
        past, rate = Fraction(self.first.pad), 1
        for block in self.blocks:
            assert isinstance(block, DecoderBlock)
            past += Fraction(block.up.pad, rate)
            rate *= block.up.stride
            past += Fraction(sum((ResidualUnit.kernel - 1) * dilation for dilation in _DILATIONS), rate)
        return math.ceil(past + Fraction(self.last.pad, rate))

    def forward(self, z: Tensor, streams: Streams | None = None) -> Tensor:
        x = self.widen(self.first(z, streams), streams)
        for block in self.blocks:
            x = block(x, streams)
        return snake_samples(x, self.alpha, self.last.weight, self.last.bias, memory_of(self.last, streams))

    def set_precision(self, precision: Precision | None) -> None:
        """Prepares loaded weights on their device, before anything is captured: "float16" copies those of the GEMMs."""
        self.precision = precision
        for module in self.modules():
            if isinstance(module, ResidualUnit):
                module.operand.choose(precision, module.pointwise_weight)
            elif isinstance(module, SnakeUpsample):
                module.operand.choose(precision, module.weight)


class AudioVAE(nn.Module):
    """Both halves of the codec. encoder_hop, decoder_hop: samples of a latent frame at either sample rate."""

    def __init__(self, config: AudioVAEConfig) -> None:
        super().__init__()
        self.encoder = Encoder(config)
        self.decoder = CodecDecoder(config)
        self.encoder_hop = math.prod(config.encoder_rates)
        self.decoder_hop = math.prod(config.decoder_rates)
        self.sample_rate = config.sample_rate

    def encode_pieces(self, wave: Tensor, frames: int = 1) -> Iterator[Tensor]:
        """float32 [samples], zero-padded on the right to the hop -> latent frames [latent_dim, n], in consecutive parts
        of about _ENCODE_SECONDS and whole groups of `frames`. Each is computed when the iterator is advanced."""
        hop = self.encoder_hop
        wave = nn.functional.pad(wave, (0, -wave.shape[0] % hop))
        streams = Streams(
            wave.new_zeros(1, self.encoder.memory_size), torch.zeros(1, dtype=torch.int64, device=wave.device)
        )
        group = hop * frames
        piece = _ENCODE_SECONDS * self.sample_rate // group * group
        for part in wave.split(piece):
            length = part.shape[0]
            if wave.is_cuda:
                # All parts have the same length, since every other length would be another set of kernels to compile.
                # The padding follows the signal, so causal convolutions do not see it.
                part = nn.functional.pad(part, (0, piece - length))
            yield self.encoder(part[None, None], streams)[0][:, : length // hop]


def _lay_out(codec_half: nn.Module) -> int:
    """Gives every convolution its place in a row of Streams.table; returns the size of a row."""
    size = 0
    for module in codec_half.modules():
        if isinstance(module, CausalConv | SnakeUpsample | ResidualUnit):
            module.offset = size
            size += module.width * module.pad
    return size
