"""Trains the decoder of the embedded voice's codec on files of training.voice.corpus that hold waves, while they are
being made.

python -m training.voice.codec DATA OUT --seconds 800 [--resume OUT/codec.pt]

It starts from the published decoder and learns two things of the same latents: the vocoder's samples, which give it a
voice without roughness, and the spectrum of natural speech, which the vocoder's lacks in silence and in weak sounds.
The encoder and the latents stay as they are. At the end OUT/audiovae.safetensors is the published file with the new
decoder.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from models.voxcpm2 import vae_layers
from models.voxcpm2.audio_vae import AudioVAE, CodecDecoder
from models.voxcpm2.config import load_config
from models.voxcpm2.vae_layers import CausalConv, ResidualUnit, SnakeUpsample, residual_unit, snake, snake_upsample
from models.voxcpm2.vae_weights import load_audio_vae, published_names
from training import loop
from training.voice.config import PUBLISHED
from training.voice.corpus import Reader, Store
from training.voice.flite import SAMPLE_RATE
from training.voice.latents import DELAY, FRAME_RATE, FRAMES, HOP, SPECTRAL, Basis, Spectrum, mel_filters
from training.voice.recogniser import down

_CODEC = "audiovae.safetensors"
_CONTEXT = 8
"""Frames in front of a crop from within speech, by which the decoder is not judged."""
_HELD_OUT = 32
"""Crops of the first speech, which is not trained on."""
_WINDOWS = (384, 1536)
"""Samples at 48 kHz, where the upper half must stay silent."""
_STEPS, _MELS, _FFT, _WINDOW, _FLOOR = 4, 80, 1024, 400, 0.04
"""Spectra in a frame, and how latents.Spectrum made them."""
_PERIOD = 3 * HOP
"""Samples of a frame at 48 kHz."""
_LINES = int(SAMPLE_RATE / 2 / FRAME_RATE) - 1
"""Sinusoids below 8 kHz, FRAME_RATE apart."""
_DISPERSION = 0.002
"""Seconds that the voice's highest frequencies come before its lowest: less of a peak than one pulse."""
_BREATH, _BREATH_WIDTH = 3500.0, 450.0
"""Hz above which a voice is noise, and how gradually."""
_NOISE, _HEARD = 0.3, 6
"""The most noise on latents that are given, and of how many crops one is of what the encoder hears."""
_QUIET = 0.05
"""Magnitudes below it count little: the gradients of roots and logarithms of silence know no bounds."""


class Vocoder:
    """What the decoder starts from: latent frames as a sum of sinusoids, a function of nothing but the frames.

    A decoder of convolutions over frames of 40 ms gives the same samples wherever its frames are alike, so what it can
    hold are multiples of 25 Hz whose phases begin anew with each frame, and that is what is asked of it."""

    def __init__(self, device: torch.device) -> None:
        self._basis = Basis.load(device)
        hertz = FRAME_RATE * torch.arange(1, _LINES + 1, dtype=torch.float32, device=device)
        self._lines = torch.arange(1, _LINES + 1, device=device)
        self._spread = _between_bands(hertz)
        self._area = mel_filters(_MELS, _FFT, SAMPLE_RATE, SAMPLE_RATE / 2).sum(1).to(device)
        self._pure = torch.sigmoid((_BREATH - hertz) / _BREATH_WIDTH)
        turns = _DISPERSION * (hertz - hertz.square() / SAMPLE_RATE)
        self._voice = torch.polar(torch.ones_like(hertz), -2.0 * torch.pi * turns)
        noise = torch.from_numpy(np.random.default_rng(25).random(_LINES, np.float32)).to(device)
        self._noise = torch.polar(torch.ones_like(hertz), 2.0 * torch.pi * noise)
        self._fade = torch.hann_window(2 * _PERIOD // _STEPS, device=device)

    def pitch(self, latents: Tensor) -> Tensor:
        """[N, D, T] -> Hz [N, T]."""
        return (latents[:, SPECTRAL : SPECTRAL + 2].mean(1) * self._basis.pitch[1] + self._basis.pitch[0]).exp()

    def __call__(self, latents: Tensor) -> Tensor:
        """float32 [N, D, T] -> [N, T * 1920] at 48 kHz, DELAY late."""
        cycles = (self.pitch(latents) / FRAME_RATE).round().clamp(min=2.0, max=20.0).long()[..., None]
        chosen = ((self._lines % cycles == 0) * cycles).repeat_interleave(_STEPS, 1)
        # Latents are -1 or 1: what is half as sure is sounded the same way.
        voiced = (0.5 + latents[:, SPECTRAL + 2 :].transpose(1, 2)).clamp(0.0, 1.0).flatten(1)
        power, share = self._power(latents.transpose(1, 2)), voiced[..., None] * self._pure
        tones = (power * share * chosen).sqrt() * self._voice + (power * (1.0 - share)).sqrt() * self._noise
        return self._sound(tones)

    def _power(self, frames: Tensor) -> Tensor:
        """[N, T, D] -> squared amplitude of each line if all of them sounded, [N, 4 T, lines]."""
        mel = self._basis.spectrum(frames).view(len(frames), -1, _MELS)
        magnitude = (mel.exp() - _FLOOR).clamp(min=0.0) / self._area
        # A sinusoid of amplitude a puts a * a / 4 * _FFT * (sum of the window's squares, 3/8 of it) into its bins.
        whole = 4.0 * FRAME_RATE / (SAMPLE_RATE / _FFT) / (_FFT * 0.375 * _WINDOW)
        return (magnitude.square() * whole) @ self._spread

    def _sound(self, tones: Tensor) -> Tensor:
        """Complex [N, 4 T, lines], each alone at the end of its 10 ms and faded in over them -> [N, T * 1920]. A frame
        is heard in itself and fades out in the next one, so that a causal decoder knows all that it has to sound."""
        count, steps, _ = tones.shape
        spectrum = F.pad(torch.view_as_real(tones), (0, 0, 1, _PERIOD // 2 - _LINES))
        periods = torch.fft.irfft(torch.view_as_complex(spectrum.contiguous()), _PERIOD) * (0.5 * _PERIOD)
        hop = _PERIOD // _STEPS
        # Half of a step's period is heard, at the place in the frame where the step is.
        starts = (torch.arange(_STEPS, device=tones.device) * hop)[:, None]
        places = (starts + torch.arange(2 * hop, device=tones.device)) % _PERIOD
        places = places.repeat(steps // _STEPS, 1).expand(count, -1, -1)
        heard = periods.gather(2, places) * self._fade
        length = (steps + 1) * hop
        whole = F.fold(heard.transpose(1, 2), (1, length), (1, 2 * hop), stride=(1, hop))[:, 0, 0]
        return whole[:, : steps * hop]


def _between_bands(hertz: Tensor) -> Tensor:
    """[mels, lines]: weights that read off values of mel bands at these frequencies, linear between their centres."""
    place = (1.0 + hertz / 700.0).log10() / math.log10(1.0 + SAMPLE_RATE / 2 / 700.0) * (_MELS + 1) - 1.0
    place = place.clamp(0.0, _MELS - 1.0)
    bands = torch.arange(_MELS, device=hertz.device)[:, None]
    return (1.0 - (place - bands).abs()).clamp(min=0.0)


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


def published(decoder: nn.Module) -> dict[str, Tensor]:
    """audiovae.safetensors as it was published, with this decoder: weight norm's two parts, float16, every bandwidth
    like the last."""
    tensors, vae = load_file(PUBLISHED / _CODEC), AudioVAE(load_config(PUBLISHED).vae)
    vae.decoder = decoder  # type: ignore[assignment]

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
        vae = AudioVAE(config)
        load_audio_vae(vae, PUBLISHED, config)
        self._encoder, self.network = vae.to(self.device).encoder, vae.decoder
        for block in self.network.blocks:
            block.up.weight.data = block.up.weight.data.contiguous()  # type: ignore[union-attr,operator]
        self._unit = torch.compile(unit, dynamic=True) if options.compile else residual_unit.reference
        self.optimiser = loop.Optimiser(self.network, average=0.998)
        self.store, self._reader = Store(options.frames, self.device, waves=True), Reader(options.data)
        self._distance = Distance(Vocoder(self.device), self.device)
        while self.store.frames < options.least * 25:
            self.store.take_in(self._reader, 1000)
            time.sleep(0.2)

    def _drawn(self, beginnings: bool) -> Tensor:
        """First frames of a batch, of utterances or anywhere; the first crops are held out."""
        count, crop, store = self.options.batch, self.options.crop + _CONTEXT, self.store
        if not beginnings:
            return torch.randint(_HELD_OUT * crop, store.frames - crop, (count,), device=self.device)
        first = FRAMES * torch.tensor(store.first, device=self.device)
        allowed = first[(first >= _HELD_OUT * crop) & (first <= store.frames - crop)]
        return allowed[torch.randint(0, len(allowed), (count,), device=self.device)]

    def _given(self, wave: Tensor, latents: Tensor) -> Tensor:
        """Latents with mistakes: of some crops those that the encoder hears, of half of the others noisy ones."""
        noise = (2.0 * torch.rand(len(latents), 1, 1, device=self.device) - 1.0).clamp(min=0.0) * _NOISE
        given, heard = latents + noise * torch.randn_like(latents), len(wave) // _HEARD
        with torch.no_grad():
            given[:heard] = self._encoder(wave[:heard, None])
        return given

    def step(self, rate: float, share: float) -> dict[str, Tensor]:
        # The decoder's memory is empty where an utterance begins: what is said there is half of a short word.
        beginnings, crop = self.steps % 2 == 0, self.options.crop + _CONTEXT
        if self.steps % 20 == 0:
            self.store.take_in(self._reader, 4)
        wave, latents = self.store.crops(self._drawn(beginnings), crop)
        given = self._given(wave, latents)
        made = sound(self.network, given, self._unit)
        parts = self._distance(made, given, wave, latents, 0 if beginnings else _CONTEXT)
        loss = parts["samples"] + 2.0 * (parts["spectrum"] + parts["envelope"]) + parts["bands"]
        loss.backward()
        return {**{name: part.detach() for name, part in parts.items()}, "norm": self.optimiser.step(rate)}

    @torch.no_grad()
    def report(self) -> Mapping[str, float]:
        """Distances of held-out speech, from the clean latents."""
        crop = self.options.crop + _CONTEXT
        wave, latents = self.store.crops(torch.arange(_HELD_OUT, device=self.device) * crop, crop)
        parts = self._distance(sound(self.network, latents), latents, wave, latents, _CONTEXT)
        return {"hours": self.store.hours, **{f"held out {name}": part.item() for name, part in parts.items()}}


if __name__ == "__main__":
    parser = loop.arguments(__doc__, seconds=800.0, rate=5e-4)
    parser.add_argument("--frames", type=int, default=1_500_000, help="room for latent frames (25 a second)")
    parser.add_argument("--least", type=float, default=600.0, help="seconds of speech to begin with")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--crop", type=int, default=16, help="latent frames that are judged")
    options = loop.begin(parser)
    loop.run(trainer := Trainer(options), options)
    save_file(published(trainer.optimiser.average), options.out / _CODEC)
