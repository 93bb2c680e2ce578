"""Trains the decoder of the embedded voice's codec on files of training.voice.corpus that hold waves, while they are
being made.

python -m training.voice.codec DATA OUT --seconds 800 [--resume OUT/codec.pt]

It starts from the published decoder and learns two things of the same latents: the vocoder's samples, which give it a
voice without roughness, and the spectrum of natural speech, which the vocoder's lacks in silence and in weak sounds.
The encoder and the latents stay as they are. OUT/audiovae.safetensors is the published file with the new decoder.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from models.voxcpm2 import vae_layers
from models.voxcpm2.audio_vae import AudioVAE, CodecDecoder
from models.voxcpm2.config import load_config
from models.voxcpm2.vae_layers import CausalConv, ResidualUnit, SnakeUpsample, residual_unit, snake, snake_upsample
from models.voxcpm2.vae_weights import load_audio_vae, published_names
from training import loop
from training.voice.config import PUBLISHED
from training.voice.corpus import Reader
from training.voice.flite import SAMPLE_RATE
from training.voice.latents import DELAY, FRAMES, HOP, LATENT_DIM, Spectrum, mel_filters
from training.voice.recogniser import down
from training.voice.vocoder import Vocoder

_CODEC = "audiovae.safetensors"
_CONTEXT = 8
"""Frames in front of a crop from within speech, by which the decoder is not judged."""
_HELD_OUT = 32
"""Crops of the first speech, which is not trained on."""
_WINDOWS = (384, 1536)
"""Samples at 48 kHz, where the upper half must stay silent."""
_QUIET = 0.05
"""Magnitudes below it count little: the gradients of roots and logarithms of silence know no bounds."""


class Waves:
    """Samples, latents and beginnings of utterances so far, on the device."""

    def __init__(self, frames: int, device: torch.device) -> None:
        self.wave = torch.zeros(frames * HOP, dtype=torch.int16, device=device)
        self.latents = torch.zeros(frames, LATENT_DIM, dtype=torch.float16, device=device)
        self.first = torch.zeros(0, dtype=torch.int64, device=device)
        self.frames = 0

    def take_in(self, reader: Reader, most: int) -> None:
        """New files, while there is room."""
        for path in islice(reader.new(), most):
            with np.load(path) as file:
                begin, end = self.frames, self.frames + len(file["latents"])
                if end > len(self.latents):
                    return
                self.wave[begin * HOP : end * HOP] = torch.from_numpy(file["wave"])
                self.latents[begin:end] = torch.from_numpy(file["latents"])
                counts = torch.from_numpy(file["patches"]).to(self.first.device) * FRAMES
                self.first = torch.cat((self.first, begin + counts.cumsum(0) - counts))
                self.frames = end

    def crops(self, start: Tensor, frames: int) -> tuple[Tensor, Tensor]:
        """First frames [n] -> samples [n, frames * HOP] and latents [n, D, frames]."""
        device = start.device
        samples = start[:, None] * HOP + torch.arange(frames * HOP, device=device)
        latents = self.latents[start[:, None] + torch.arange(frames, device=device)]
        return self.wave[samples].float() / 32768.0, latents.float().transpose(1, 2)


class Distance:
    """How far made samples at 48 kHz lie from the vocoder's, and their spectra from those of natural ones."""

    def __init__(self, vocoder: Vocoder, device: torch.device) -> None:
        self._vocoder, self._envelope = vocoder, Spectrum(device)
        self._windows = [torch.hann_window(size, device=device) for size in _WINDOWS]
        self._short = torch.hann_window(256, device=device)
        self._filters = mel_filters(40, 512, SAMPLE_RATE, SAMPLE_RATE / 2).to(device).T

    def __call__(self, made: Tensor, given: Tensor, wave: Tensor, latents: Tensor, context: int) -> dict[str, Tensor]:
        """made [N, 3 n] of the latents that were given, wave [N, n] and its latents; frames before `context` do not
        count."""
        followed, heard, natural = self._vocoder(given), down(made), F.pad(wave, (DELAY, 0))[:, :-DELAY]
        pitch = self._vocoder.pitch(latents)
        heard, natural, pitch = F.pad(heard, (HOP, 0)), F.pad(natural, (HOP, 0)), F.pad(pitch, (1, 0), value=180.0)
        a, b = (self._envelope(x.flatten(), pitch.flatten()).unflatten(0, pitch.shape) for x in (heard, natural))
        made, followed = made[:, 3 * HOP * context :], followed[:, 3 * HOP * context :]
        near = [(self._bands(x[:, HOP * context :])) for x in (heard, natural)]
        return {
            "samples": (made - followed).abs().mean() / followed.abs().mean().clamp(min=1e-3),
            "spectrum": torch.stack([self._linear(made, followed, window) for window in self._windows]).mean(),
            "envelope": (a - b)[:, 1 + context :].abs().mean(),
            "bands": (near[0] - near[1]).abs().mean(),
        }

    def _linear(self, made: Tensor, wanted: Tensor, window: Tensor) -> Tensor:
        """Of roots of magnitudes, as loud to the ear as they are large; about 1 where nothing fits."""
        spectra = (torch.fft.rfft(x.unfold(1, len(window), len(window) // 4) * window) for x in (made, wanted))
        a, b = ((x.real.square() + x.imag.square() + _QUIET**2) ** 0.25 for x in spectra)
        return (a - b).abs().mean() / (b - _QUIET**0.5).mean().clamp(min=0.1)

    def _bands(self, wave: Tensor) -> Tensor:
        """Log-mel values of short windows."""
        spectrum = torch.fft.rfft(wave.unfold(1, len(self._short), len(self._short) // 4) * self._short, 512)
        return torch.log((spectrum.real.square() + spectrum.imag.square() + 1e-6).sqrt() @ self._filters + _QUIET)


def unit(
    x: Tensor, alpha: Tensor, taps: Tensor, bias: Tensor, dilation: int, alpha_out: Tensor, weight: Tensor, out: Tensor
) -> Tensor:
    """vae_layers.residual_unit with its depthwise convolution as a sum of products, which is faster once compiled."""
    length, hidden = x.shape[-1], F.pad(snake(x, alpha), ((taps.shape[-1] - 1) * dilation, 0))
    total = bias[:, None] + taps[:, 0, :1] * hidden[..., :length]
    for tap in range(1, taps.shape[-1]):
        total = total + taps[:, 0, tap : tap + 1] * hidden[..., tap * dilation : tap * dilation + length]
    return x + F.conv1d(snake(total, alpha_out), weight, out)


def sound(decoder: CodecDecoder, latents: Tensor, unit: Callable[..., Tensor] = residual_unit.reference) -> Tensor:
    """CodecDecoder.forward by plain PyTorch, which has gradients: [N, D, T] -> samples [N, n]."""
    x = decoder.widen(decoder.first(latents))
    for block in decoder.blocks:
        up: SnakeUpsample = block.up  # type: ignore[assignment]
        x = snake_upsample.reference(x, up.scale, up.shift, up.alpha, up.weight, up.bias, up.stride)
        for part in block.units:  # type: ignore[union-attr]
            inner = part.alpha_in, part.depthwise_weight, part.depthwise_bias, part.dilation
            x = unit(x, *inner, part.alpha_out, part.pointwise_weight, part.pointwise_bias)
    return vae_layers.snake_samples.reference(x, decoder.alpha, decoder.last.weight, decoder.last.bias)[:, 0]


def published(vae: AudioVAE) -> dict[str, Tensor]:
    """audiovae.safetensors as it was published, with this decoder: weight norm's two parts, float16, every bandwidth
    like the last."""
    tensors = load_file(PUBLISHED / _CODEC)

    def put(name: str, value: Tensor) -> None:
        tensors[name] = value.detach().cpu().expand(tensors[name].shape).half().contiguous()

    def convolution(name: str, weight: Tensor, bias: Tensor) -> None:
        put(f"{name}.weight_v", weight)
        put(f"{name}.weight_g", torch.linalg.vector_norm(weight, dim=(1, 2), keepdim=True))
        put(f"{name}.bias", bias)

    for part, name in published_names(vae):
        if name.startswith("encoder."):
            continue
        if isinstance(part, ResidualUnit):
            put(f"{name}.block.0.alpha", part.alpha_in[:, None])
            convolution(f"{name}.block.1", part.depthwise_weight, part.depthwise_bias)
            put(f"{name}.block.2.alpha", part.alpha_out[:, None])
            convolution(f"{name}.block.3", part.pointwise_weight, part.pointwise_bias)
        elif isinstance(part, SnakeUpsample):
            put(f"{name}.block.0.alpha", part.alpha[:, None])
            convolution(f"{name}.block.1", part.weight, part.bias)
            condition = name.replace("decoder.model.", "decoder.sr_cond_model.")
            put(f"{condition}.scale_embed.weight", part.scale)
            put(f"{condition}.bias_embed.weight", part.shift)
        elif isinstance(part, CausalConv):
            convolution(name, part.weight, part.bias)
        else:
            put(name, part[:, None])
    return tensors


class Trainer:
    name = "codec"

    def __init__(self, options: argparse.Namespace) -> None:
        self.steps, self.options, self.device = 0, options, loop.device()
        config = load_config(PUBLISHED).vae
        self.vae = AudioVAE(config)
        load_audio_vae(self.vae, PUBLISHED, config, config.out_sample_rate)
        self.vae.to(self.device).encoder.requires_grad_(False)
        for block in self.vae.decoder.blocks:
            block.up.weight.data = block.up.weight.data.contiguous()  # type: ignore[union-attr,operator]
        self._unit = torch.compile(unit, dynamic=True) if options.compile else residual_unit.reference
        self.optimiser = loop.Optimiser(self.vae.decoder, average=0.998)
        self.waves, self._reader = Waves(options.frames, self.device), Reader(options.data)
        self._distance = Distance(Vocoder(self.device), self.device)
        while self.waves.frames < options.least * 25:
            self.waves.take_in(self._reader, 1000)
            time.sleep(0.2)

    def _drawn(self, beginnings: bool) -> Tensor:
        """First frames of a batch, of utterances or anywhere; the first crops are held out."""
        count, crop, waves = self.options.batch, self.options.crop + _CONTEXT, self.waves
        if not beginnings:
            return torch.randint(_HELD_OUT * crop, waves.frames - crop, (count,), device=self.device)
        allowed = waves.first[(waves.first >= _HELD_OUT * crop) & (waves.first <= waves.frames - crop)]
        return allowed[torch.randint(0, len(allowed), (count,), device=self.device)]

    def _given(self, wave: Tensor, latents: Tensor) -> Tensor:
        """Latents with mistakes: of some crops those that the encoder hears, of half of the others noisy ones."""
        heard = len(wave) // self.options.heard if self.options.heard else 0
        noise = (2.0 * torch.rand(len(latents), 1, 1, device=self.device) - 1.0).clamp(min=0.0) * self.options.noise
        given = latents + noise * torch.randn_like(latents)
        if heard:
            with torch.no_grad():
                given[:heard] = self.vae.encoder(wave[:heard, None])
        return given

    def step(self, share: float, nth: int) -> dict[str, Tensor]:
        # The decoder's memory is empty where an utterance begins: what is said there is half of a short word.
        beginnings, options = nth % 2 == 0, self.options
        if nth % 20 == 0:
            self.waves.take_in(self._reader, 4)
        wave, latents = self.waves.crops(self._drawn(beginnings), options.crop + _CONTEXT)
        given = self._given(wave, latents)
        made = sound(self.vae.decoder, given, self._unit)
        parts = self._distance(made, given, wave, latents, 0 if beginnings else _CONTEXT)
        loss = options.follow * (parts["samples"] + 2.0 * parts["spectrum"])
        (loss + options.natural * (parts["envelope"] + 0.5 * parts["bands"])).backward()
        norm = self.optimiser.step(loop.rate_at(options.rate, share, nth, warm=100, floor=0.02, cosine=True))
        return {**{name: part.detach() for name, part in parts.items()}, "norm": norm}

    @torch.no_grad()
    def report(self) -> Mapping[str, float]:
        """Distances of held-out speech, from the clean latents."""
        crop = self.options.crop + _CONTEXT
        wave, latents = self.waves.crops(torch.arange(_HELD_OUT, device=self.device) * crop, crop)
        parts = self._distance(sound(self.vae.decoder, latents), latents, wave, latents, _CONTEXT)
        return {
            "hours": self.waves.frames / 90_000,
            **{f"held out {name}": part.item() for name, part in parts.items()},
        }

    def state(self) -> dict[str, Any]:
        """The moving average; momenta begin anew. FloatingPointError rather than a state of no use."""
        average = self.optimiser.average.state(torch.float32)
        if not all(value.isfinite().all() for value in average.values()):
            raise FloatingPointError("the decoder has NaN or infinite weights")
        return {"decoder": average}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.vae.decoder.load_state_dict(state["decoder"])
        self.optimiser.average.restart()

    def kept(self) -> None:
        now = [parameter.detach().clone() for parameter in self.vae.decoder.parameters()]
        self.optimiser.average.copy_to(self.vae.decoder)
        hidden = self.options.out / f"{_CODEC}.part"
        save_file(published(self.vae), hidden)
        hidden.rename(self.options.out / _CODEC)
        with torch.no_grad():
            torch._foreach_copy_(list[Tensor](self.vae.decoder.parameters()), now)


def main() -> None:
    parser = loop.arguments(__doc__, seconds=800.0, rate=5e-4)
    parser.add_argument("--frames", type=int, default=1_500_000, help="room for latent frames (25 a second)")
    parser.add_argument("--least", type=float, default=600.0, help="seconds of speech to begin with")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--crop", type=int, default=16, help="latent frames that are judged")
    parser.add_argument("--noise", type=float, default=0.3, help="most noise on latents")
    parser.add_argument("--heard", type=int, default=6, help="one crop in so many is of latents that the encoder hears")
    parser.add_argument("--follow", type=float, default=1.0, help="weight of the vocoder's samples")
    parser.add_argument("--natural", type=float, default=2.0, help="weight of natural spectra")
    options = loop.begin(parser)
    loop.run(Trainer(options), options)


if __name__ == "__main__":
    main()
