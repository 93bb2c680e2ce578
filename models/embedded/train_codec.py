"""Trains the embedded voice's codec on files of models.embedded.voices.corpus that hold samples.

python -m models.embedded.train_codec DATA OUT --seconds 400 [--resume STATE]
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from models.embedded.voices import corpus
from models.embedded.voices.codec import Codec, Conv, Snake
from models.embedded.voices.config import CONFIG
from models.embedded.voices.corpus import Reader
from models.embedded.voices.discriminators import NEAR, WIDE, Judges, SpectralDistance, generator_losses, judge_loss
from models.embedded.voices.latents import DELAY, HOP, LATENT_DIM
from models.embedded.voices.resampling import down, up

_CONTEXT = 6
"""Frames in front of a crop that the codec hears without being judged by them."""


class Waves:
    """Samples and latents so far, on the device."""

    def __init__(self, frames: int, device: torch.device) -> None:
        self.wave = torch.zeros(frames * HOP, dtype=torch.int16, device=device)
        self.latents = torch.zeros(frames, LATENT_DIM, dtype=torch.float16, device=device)
        self.frames = 0

    def take_in(self, reader: Reader, most: int) -> None:
        for number, path in enumerate(reader.new()):
            file = corpus.read(path)
            count = len(file.latents)
            if len(file.wave) == count * HOP and self.frames + count <= len(self.latents):
                begin, end = self.frames, self.frames + count
                self.wave[begin * HOP : end * HOP] = torch.from_numpy(file.wave)
                self.latents[begin:end] = torch.from_numpy(file.latents)
                self.frames = end
            if number + 1 >= most:
                return

    def crops(self, count: int, frames: int) -> tuple[Tensor, Tensor]:
        """-> samples [count, frames * HOP + DELAY], the first DELAY of them in front of the frames, and latents
        [count, D, frames]."""
        device = self.wave.device
        start = torch.randint(1, self.frames - frames, (count, 1), device=device)
        samples = start * HOP - DELAY + torch.arange(frames * HOP + DELAY, device=device)
        latents = self.latents[start + torch.arange(frames, device=device)]
        return self.wave[samples].float() / 32768.0, latents.float().transpose(1, 2)


@dataclass(frozen=True)
class Weights:
    """The published codec's, but for the encoder: it is told what to hear."""

    spectrum: float = 15.0
    features: float = 2.0
    judges: float = 1.0
    latents: float = 1.0


class Trainer:
    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.device, self.weights = options, device, Weights()
        self.codec, self.judges = Codec(CONFIG["audio_vae_config"]).to(device), Judges().to(device)
        if device.type == "cuda":
            self.judges.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.near, self.wide = SpectralDistance(16000, NEAR).to(device), SpectralDistance(48000, WIDE).to(device)
        fused = device.type == "cuda"
        self.optimiser = torch.optim.AdamW(self.codec.parameters(), betas=(0.8, 0.99), fused=fused, weight_decay=0.0)
        self.critic = torch.optim.AdamW(self.judges.parameters(), betas=(0.8, 0.99), fused=fused, weight_decay=0.0)
        if options.compile:
            Snake.function = staticmethod(torch.compile(Snake.function, dynamic=True))
        self.average = [parameter.detach().clone() for parameter in self.codec.parameters()]

    def step(self, waves: Waves, rate: float, judged: bool) -> dict[str, Tensor]:
        for optimiser in (self.optimiser, self.critic):
            for group in optimiser.param_groups:
                group["lr"] = rate
        wave, latents = waves.crops(self.options.batch, _CONTEXT + self.options.crop)
        real = wave[:, _CONTEXT * HOP : -DELAY]
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            heard = self.codec.encoder(wave[:, None, DELAY:]).float()
            given = self._given(latents, heard.detach())
            # In bfloat16 its rounding would be noise that a judge hears and that nothing can be done about.
            with torch.autocast(self.device.type, enabled=False):
                made48 = self.codec.decoder(given)[:, 0, 3 * _CONTEXT * HOP :]
            made = down(made48)
            parts = {
                "latents": (heard - latents)[..., _CONTEXT:].square().mean(),
                "spectrum": 0.5 * (self.near(made, real) + self.wide(made48, up(real))),
            }
            if judged:
                self._teach(real, made)
                views = self.judges(torch.cat((real, made)))
                halves = [[(s[h], [f[h] for f in fs]) for s, fs in views] for h in _halves(len(real))]
                parts["judges"], parts["features"] = generator_losses(*halves)
        loss = sum(
            (getattr(self.weights, name) * part for name, part in parts.items()), torch.zeros((), device=self.device)
        )
        loss.backward()
        parts["norm"] = torch.nn.utils.clip_grad_norm_(self.codec.parameters(), 50.0)
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.critic.zero_grad()
        torch._foreach_lerp_(self.average, [parameter.detach() for parameter in self.codec.parameters()], 0.002)
        return parts

    def _given(self, latents: Tensor, heard: Tensor) -> Tensor:
        """What the decoder gets: the latents with a little noise, now and then those that the encoder heard."""
        noise = torch.rand(len(latents), 1, 1, device=self.device) * self.options.noise
        own = torch.rand(len(latents), 1, 1, device=self.device) < 0.25
        return torch.where(own, heard, latents + noise * torch.randn_like(latents))

    def _teach(self, real: Tensor, made: Tensor) -> None:
        views = self.judges(torch.cat((real, made.detach())))
        real_half, made_half = _halves(len(real))
        scores = [score for score, _ in views]
        judge_loss([score[real_half] for score in scores], [score[made_half] for score in scores]).backward()
        self.critic.step()
        self.critic.zero_grad()


def _halves(count: int) -> tuple[slice, slice]:
    return slice(0, count), slice(count, 2 * count)


def train(options: argparse.Namespace) -> None:
    begun = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(options.seed)
    torch.backends.cudnn.benchmark = True
    torch.set_float32_matmul_precision("high")
    trainer, steps = Trainer(options, device), 0
    if options.resume:
        state = torch.load(options.resume, map_location=device, weights_only=True)
        for module, name in ((trainer.codec, "codec"), (trainer.judges, "judges")):
            module.load_state_dict({key: value.to(_dtype(value)) for key, value in state[name].items()})
        for average, parameter in zip(trainer.average, trainer.codec.parameters(), strict=True):
            average.copy_(parameter.detach())
        steps = int(state["steps"])
    waves, reader = Waves(options.frames, device), Reader(options.data)
    while waves.frames < options.least * 25:
        waves.take_in(reader, 1000)
        time.sleep(0.2)
    if device.type == "cuda":
        choose_convolution(trainer, waves)
    reported, log = begun, (options.out / "codec.jsonl").open("a")
    while (spent := time.monotonic() - begun) < options.seconds:
        share = spent / options.seconds
        rate = min(1.0, (steps + 1) / 200) * options.rate * (options.last_rate / options.rate) ** share
        judged = options.resume is not None or share > options.alone
        parts = trainer.step(waves, rate, judged)
        steps += 1
        if steps % 20 == 0:
            waves.take_in(reader, 4)
        if steps % 200 == 0 or time.monotonic() - reported > 10:
            reported = time.monotonic()
            values = {name: round(value.item(), 4) for name, value in parts.items()}
            entry = {"s": round(spent, 1), "step": steps, "hours": round(waves.frames / 90000, 2), **values}
            print(json.dumps(entry), flush=True)
            log.write(json.dumps(entry) + "\n")
            log.flush()
    save(options.out, trainer, steps)


def choose_convolution(trainer: Trainer, waves: Waves) -> None:
    """The faster one of two ways to compute depthwise convolutions here."""
    seconds = {}
    for shifts in (False, True):
        Conv.shifts = shifts
        for count in (2, 5):
            torch.cuda.synchronize()
            begun = time.monotonic()
            for _ in range(count):
                trainer.step(waves, 0.0, judged=False)
            torch.cuda.synchronize()
        seconds[shifts] = (time.monotonic() - begun) / count
    Conv.shifts = seconds[True] < seconds[False]
    print(json.dumps({"seconds a step": seconds, "shifts": Conv.shifts}), flush=True)


def _dtype(value: Tensor) -> torch.dtype:
    return torch.float32 if value.is_floating_point() else value.dtype


def save(out: Path, trainer: Trainer, steps: int) -> None:
    """The codec's moving average and its judges, in half precision."""
    codec = trainer.codec
    for parameter, value in zip(codec.parameters(), trainer.average, strict=True):
        parameter.data.copy_(value)
    parts = {}
    for name, module in (("codec", codec), ("judges", trainer.judges)):
        state = module.state_dict()
        parts[name] = {key: (v.half() if v.is_floating_point() else v).cpu() for key, v in state.items()}
    torch.save({**parts, "steps": steps}, out / "codec.pt")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=400.0)
    parser.add_argument("--resume", type=Path)
    parser.add_argument("--rate", type=float, default=5e-4)
    parser.add_argument("--last-rate", type=float, default=6e-5)
    parser.add_argument("--alone", type=float, default=0.2, help="share of the time without judges")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--crop", type=int, default=16, help="latent frames")
    parser.add_argument("--noise", type=float, default=0.3, help="most noise on latents")
    parser.add_argument("--least", type=float, default=600.0, help="seconds of speech to begin with")
    parser.add_argument("--frames", type=int, default=2_500_000, help="room for latent frames (25 a second)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    train(options)


if __name__ == "__main__":
    main()
