"""Trains the embedded voice's codec on files of models.embedded.voices.corpus that hold samples.

python -m models.embedded.train_codec DATA OUT --seconds 400 [--resume STATE]

The decoder learns the vocoder's samples, first at 16 kHz with a plain head in front of its last stage, then, for the
last part of the time, with that stage; the encoder learns to hear the latents beside it.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import math
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from models.embedded.voices import corpus, training
from models.embedded.voices.codec import Codec, Conv, Head, compile_snakes
from models.embedded.voices.config import CONFIG
from models.embedded.voices.corpus import Reader
from models.embedded.voices.distances import NEAR, WIDE, SpectralDistance, sample_distance
from models.embedded.voices.latents import HOP, LATENT_DIM, Basis
from models.embedded.voices.resampling import down
from models.embedded.voices.training import Average, Clock, Record
from models.embedded.voices.vocoder import Vocoder

_CONTEXT = 6
"""Frames in front of a crop that the codec hears without being judged by them."""
_WARM_UP = 100
"""Steps until the rate is whole."""


class Waves:
    """Samples and latents so far, on the device."""

    def __init__(self, frames: int, device: torch.device) -> None:
        self.wave = torch.zeros(frames * HOP, dtype=torch.int16, device=device)
        self.latents = torch.zeros(frames, LATENT_DIM, dtype=torch.float16, device=device)
        self.frames = 0

    def take_in(self, reader: Reader, most: int) -> None:
        for path in itertools.islice(reader.new(), most):
            file = corpus.read(path)
            count = len(file.latents)
            if len(file.wave) == count * HOP and self.frames + count <= len(self.latents):
                begin, end = self.frames, self.frames + count
                self.wave[begin * HOP : end * HOP] = torch.from_numpy(file.wave)
                self.latents[begin:end] = torch.from_numpy(file.latents)
                self.frames = end

    def crops(self, count: int, frames: int) -> tuple[Tensor, Tensor]:
        """-> samples [count, frames * HOP] and latents [count, D, frames]."""
        device = self.wave.device
        start = torch.randint(0, self.frames - frames, (count, 1), device=device)
        samples = start * HOP + torch.arange(frames * HOP, device=device)
        latents = self.latents[start + torch.arange(frames, device=device)]
        return self.wave[samples].float() / 32768.0, latents.float().transpose(1, 2)


class Learner:
    """Parameters with their own optimiser, limit of gradients and moving average."""

    def __init__(self, module: nn.Module, limit: float, average: float) -> None:
        self.parameters = list(module.parameters())
        fused = self.parameters[0].device.type == "cuda"
        self._adam = torch.optim.AdamW(self.parameters, betas=(0.9, 0.98), fused=fused, weight_decay=0.0)
        self._limit, self.average = limit, Average(module, average)

    def step(self, loss: Tensor, rate: float) -> Tensor:
        """-> the gradients' norm."""
        for group in self._adam.param_groups:
            group["lr"] = rate
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self._limit)
        self._adam.step()
        self._adam.zero_grad()
        self.average.step()
        return norm


class Trainer:
    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.device, self.half, self.whole = options, device, False, False
        self.codec = Codec(CONFIG["audio_vae_config"]).to(device)
        self.head = Head(self.codec.decoder).to(device)
        self.vocoder = Vocoder(Basis.load(options.basis, device), device)
        self.near, self.wide = SpectralDistance(NEAR).to(device), SpectralDistance(WIDE).to(device)
        self.hearing = Learner(self.codec.encoder, 1.0, options.average)
        self.sounding = Learner(nn.ModuleList((self.codec.decoder, self.head)), 1.0, options.average)
        if options.compile:
            compile_snakes()

    def step(self, waves: Waves, rate: float) -> dict[str, Tensor]:
        wave, latents = waves.crops(self.options.batch, _CONTEXT + self.options.crop)
        return {**self._hear(wave, latents, rate), **self._sound(latents, rate)}

    def finish_head(self) -> None:
        """From here on the decoder's last stage takes part."""
        self.sounding.average.copy_to(nn.ModuleList((self.codec.decoder, self.head)))
        self.head.hand_over(self.codec.decoder)
        self.train_whole()

    def train_whole(self) -> None:
        self.sounding = Learner(self.codec.decoder, 1.0, self.options.average)
        self.whole = True

    def _hear(self, wave: Tensor, latents: Tensor, rate: float) -> dict[str, Tensor]:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == "cuda"):
            heard = self.codec.encoder(wave[:, None]).float()
        loss = (heard - latents)[..., _CONTEXT:].square().mean()
        norm = self.hearing.step(loss, rate)
        return {"latents": loss.detach(), "hearing norm": norm}

    def _sound(self, latents: Tensor, rate: float) -> dict[str, Tensor]:
        noise = torch.rand(len(latents), 1, 1, device=self.device) * self.options.noise
        given = latents + noise * torch.randn_like(latents)
        # Mistakes of the language model are sounded as they are: a function of the latents has nothing to guess.
        wanted = self.vocoder(given)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half and not self.whole):
            made = self.codec.decoder(given)[:, 0] if self.whole else self.head(self.codec.decoder, given)[:, 0]
        scale, distance = (3, self.wide) if self.whole else (1, self.near)
        if not self.whole:
            wanted = down(torch.roll(wanted, -Head.EARLY, 1))
        made, wanted = (wave[:, _CONTEXT * HOP * scale : -16 * scale] for wave in (made, wanted))
        samples, spectrum = sample_distance(made, wanted), distance(made, wanted)
        norm = self.sounding.step(samples + 2.0 * spectrum, rate)
        return {"samples": samples.detach(), "spectrum": spectrum.detach(), "sounding norm": norm}


def train(options: argparse.Namespace) -> None:
    clock, device = Clock(options.seconds), training.prepare(options.seed)
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = True
    trainer, steps = Trainer(options, device), 0
    if options.resume:
        steps = resume(options.resume, trainer)
    waves, reader = Waves(options.frames, device), Reader(options.data)
    while waves.frames < options.least * 25:
        waves.take_in(reader, 1000)
        time.sleep(0.2)
    if device.type == "cuda":
        choose_arithmetic(trainer, waves)
    report, keep = clock.every(10), clock.every(60)
    first, record = steps, Record(options.out / "codec.jsonl")
    while clock.running():
        if clock.share > 1.0 - options.whole and not trainer.whole:
            trainer.finish_head()
        parts = trainer.step(waves, rate_at(clock.share, steps - first, options.rate))
        steps += 1
        if steps % 20 == 0:
            waves.take_in(reader, 4)
        if report.due(anyway=steps - first == 1):
            record.write(clock, steps, waves.frames / 90000, parts)
        if keep.due():
            save(options.out, trainer, steps)
    save(options.out, trainer, steps)


def rate_at(share: float, steps: int, rate: float) -> float:
    """A warm-up of some steps, then half a cosine over the time, to a fiftieth."""
    return min(1.0, (steps + 1) / _WARM_UP) * rate * (0.02 + 0.49 * (1.0 + math.cos(math.pi * min(1.0, share))))


def choose_arithmetic(trainer: Trainer, waves: Waves) -> None:
    """The fastest of the ways to compute depthwise convolutions and of two precisions here."""
    seconds = {}
    for choice in itertools.product((False, True), repeat=2):
        Conv.shifts, trainer.half = choice
        for count in (2, 5):
            torch.cuda.synchronize()
            begun = time.monotonic()
            for _ in range(count):
                trainer.step(waves, 0.0)
            torch.cuda.synchronize()
        seconds[choice] = (time.monotonic() - begun) / count
    Conv.shifts, trainer.half = min(seconds, key=lambda choice: seconds[choice])
    timed = {f"shifts {shifts}, half {half}": round(value, 4) for (shifts, half), value in seconds.items()}
    training.say({"seconds a step": timed, "shifts": Conv.shifts, "half": trainer.half})


def save(out: Path, trainer: Trainer, steps: int) -> None:
    """The moving averages, the codec's in half precision. Before its last stage is trained, that does what the head
    does, so that every state can be listened to."""
    codec, head = copy.deepcopy(trainer.codec), copy.deepcopy(trainer.head)
    sounding = codec.decoder if trainer.whole else nn.ModuleList((codec.decoder, head))
    trainer.hearing.average.copy_to(codec.encoder)
    trainer.sounding.average.copy_to(sounding)
    if not trainer.whole:
        head.hand_over(codec.decoder)
    state = {name: (v.half() if v.is_floating_point() else v).cpu() for name, v in codec.state_dict().items()}
    plain = {name: v.cpu() for name, v in head.state_dict().items()}
    training.save(out / "codec.pt", {"codec": state, "head": plain, "whole": trainer.whole, "steps": steps})


def resume(path: Path, trainer: Trainer) -> int:
    """-> the steps so far. Optimisers begin anew."""
    state = torch.load(path, map_location=trainer.device, weights_only=True)
    trainer.codec.load_state_dict(
        {name: v.float() if v.is_floating_point() else v for name, v in state["codec"].items()}
    )
    trainer.head.load_state_dict(state["head"])
    for learner in (trainer.hearing, trainer.sounding):
        learner.average.restart()
    if state["whole"]:
        trainer.train_whole()
    return int(state["steps"])


def main() -> None:
    parser = training.arguments(__doc__, seconds=400.0, rate=1.5e-3)
    training.resumable(parser, frames=2_500_000)
    parser.add_argument("--whole", type=float, default=0.2, help="share of the time, at the end, with the last stage")
    parser.add_argument("--average", type=float, default=0.998, help="of the weights, for each step")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--crop", type=int, default=16, help="latent frames")
    parser.add_argument("--noise", type=float, default=0.3, help="most noise on latents")
    parser.add_argument("--least", type=float, default=600.0, help="seconds of speech to begin with")
    parser.add_argument("--basis", type=Path, default=Path(corpus.__file__).parent / "basis.npz")
    parser.add_argument("--compile", action="store_true", help="the snakes")
    train(training.parsed(parser))


if __name__ == "__main__":
    main()
