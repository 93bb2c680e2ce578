"""Trains the recogniser that judges the embedded voice, on files of models.embedded.voices.corpus of other voices.

python -m models.embedded.train_recogniser DATA OUT --seconds 600 --test DIRECTORY
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import time
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

from models.embedded.voices import corpus, training
from models.embedded.voices.corpus import Reader
from models.embedded.voices.decoder import Phones, learn_language, learn_phones
from models.embedded.voices.disguise import disguise
from models.embedded.voices.flite import Flite
from models.embedded.voices.latents import PATCH
from models.embedded.voices.recogniser import SOUND, WEIGHTS, PhoneNet, Recogniser, distance, load
from models.embedded.voices.sentences import Writer
from models.embedded.voices.training import Average, Clock, say

_AVERAGE = 0.999
"""Of the weights, for each step."""
_COUNTED = 60_000
"""Sentences that tell what follows what."""


class Utterances:
    """Samples and phones (50 a second) of all files so far, on the device; crops go over the ends of utterances."""

    def __init__(self, device: torch.device, seconds: int = 90_000) -> None:
        self._waves = torch.zeros(seconds * 16000, dtype=torch.int16, device=device)
        self._sounds = torch.zeros(seconds * 50, dtype=torch.uint8, device=device)
        self.frames, self.count = 0, 0

    def take_in(self, reader: Reader) -> None:
        for path in reader.new():
            file = corpus.read(path)
            end = self.frames + len(file.sounds)
            if end > len(self._sounds):
                return
            self._waves[self.frames * SOUND : end * SOUND] = torch.from_numpy(file.wave)
            self._sounds[self.frames : end] = torch.from_numpy(file.sounds)
            self.frames, self.count = end, self.count + len(file.texts)

    def crops(self, count: int, frames: int) -> tuple[Tensor, Tensor]:
        """Samples [count, frames * 320] and phones [count, frames]."""
        device = self._waves.device
        start = torch.randint(0, self.frames - frames, (count, 1), device=device)
        waves = self._waves[start * SOUND + torch.arange(frames * SOUND, device=device)].float() / 32768.0
        return waves, self._sounds[start + torch.arange(frames, device=device)].long()

    def phones(self) -> Phones:
        return learn_phones(self._sounds[: self.frames].cpu().numpy())


def stretched(mel: Tensor, sounds: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """Features [N, mels, 2 * frames] and their phones [N, frames], slower (> 1) or faster."""
    frames = int(sounds.shape[1] * factor)
    place = ((torch.arange(frames, device=sounds.device) + 0.5) / factor).long().clamp(max=sounds.shape[1] - 1)
    return F.interpolate(mel, size=2 * frames, mode="linear"), sounds[:, place]


def hidden(mel: Tensor) -> Tensor:
    """Some moments and bands are not heard (SpecAugment, arXiv:1904.08779)."""
    for _ in range(2):
        start, band = random.randrange(max(1, mel.shape[2] - 8)), random.randrange(mel.shape[1] - 5)
        mel[:, :, start : start + random.randrange(8)] = 0.0
        mel[:, band : band + random.randrange(5)] = 0.0
    return mel


class Trainer:
    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.options, self.net = options, PhoneNet().to(device)
        self.optimiser = torch.optim.AdamW(self.net.parameters(), lr=options.rate, weight_decay=0.02, betas=(0.9, 0.98))
        self.average = Average(self.net, _AVERAGE)
        self.steps = 0

    def step(self, utterances: Utterances, share: float) -> Tensor:
        """share: of the time that has gone by."""
        for group in self.optimiser.param_groups:
            group["lr"] = min(1.0, (self.steps + 1) / 300) * self.options.rate * (1.0 - 0.99 * share)
        seconds = random.choice((1, 2, 3, 4))
        waves, sounds = utterances.crops(max(1, self.options.batch // seconds), seconds * 50)
        with torch.no_grad():
            mel = self.net.features(disguise(self.net.spectrum(waves)))
        mel, sounds = stretched(mel, sounds, random.uniform(0.8, 1.25))
        with torch.autocast(mel.device.type, torch.bfloat16, enabled=mel.is_cuda):
            logs = self.net(hidden(mel))
        loss = F.cross_entropy(logs.float(), sounds, label_smoothing=0.05)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad()
        self.average.step()
        self.steps += 1
        return loss.detach()

    def save(self, path: Path, phones: Phones) -> None:
        """The moving average, in half precision. A run that is cut short leaves a whole file."""
        known = {name: torch.from_numpy(value) for name, value in vars(phones).items()}
        whole = path.with_suffix(".part")
        save_file({**self.average.state(torch.half), **known}, whole)
        whole.rename(path)


def train(options: argparse.Namespace, device: torch.device, words: BaseProcess) -> None:
    """Reports how the average does on the first directory of --test while it is being trained.

    words: writes the lexicon, without which nothing can be tested."""
    clock = Clock(options.seconds)
    random.seed(0)
    trainer, utterances, reader = Trainer(options, device), Utterances(device, options.room), Reader(options.data)
    while utterances.count < options.least:
        utterances.take_in(reader)
        time.sleep(0.5)
    report, path = clock.every(options.report), options.out / WEIGHTS
    while clock.running():
        loss = trainer.step(utterances, clock.share)
        if trainer.steps % 50 == 0:
            utterances.take_in(reader)
        if report.due():
            trainer.save(path, utterances.phones())
            values: dict[str, float] = {"s": round(clock.spent, 1), "step": trainer.steps}
            values |= {"n": utterances.count, "loss": round(loss.item(), 4)}
            if options.test and words.exitcode == 0:
                recogniser = load(options.out, device)
                values |= test(recogniser, hear(recogniser, options.test[0], device, 30, feigned=False), 30)
            say(values)
    trainer.save(path, utterances.phones())


def write_lexicon(options: argparse.Namespace) -> None:
    """Words as the quick diphone voice says them: the front end is the same for all of Flite's voices."""
    writer = Writer(12_345)
    texts = [writer.sentence() for _ in range(options.texts)] + [writer.known_words() for _ in range(options.texts)]
    speaker = Flite("kal16", options.library)
    # Nobody listens.
    speaker.set("duration_stretch", 0.2)
    language = learn_language(speaker, texts, [writer.sentence() for _ in range(_COUNTED)])
    language.save(options.out / "lexicon.json")
    say({"words": len(language.words), "kinds": len(language.follows)})


@dataclass(frozen=True, eq=False)
class Hearing:
    """One utterance: log-probabilities [frames, phones] of what was heard, the phones [frames] and the text spoken."""

    logs: np.ndarray
    sounds: np.ndarray
    text: str


@torch.no_grad()
def hear(recogniser: Recogniser, directory: Path, device: torch.device, most: int, feigned: bool) -> list[Hearing]:
    """The first utterances of a directory's files without digits; feigned: as other speakers would say them."""
    net, heard = recogniser.net, list[Hearing]()
    for path in Reader(directory).new():
        file = corpus.read(path)
        waves = torch.from_numpy(file.wave).split((file.patches * PATCH).tolist())
        sounds = torch.from_numpy(file.sounds).split((file.patches * (PATCH // SOUND)).tolist())
        for wave, sound, text, spoken in zip(waves, sounds, file.texts, file.spoken, strict=True):
            if any(character.isdigit() for character in text) or len(heard) >= most:
                continue
            log = net.spectrum(wave.to(device)[None].float() / 32768.0)
            found = net(net.features(disguise(log) if feigned else log))[0].T
            heard.append(Hearing(found.float().cpu().numpy(), sound.numpy(), spoken))
    return heard


def keep(path: Path, heard: list[Hearing]) -> None:
    """So that decoders can be compared without the network: float16 logs, uint8 sounds, texts, frames of each."""
    if heard:
        np.savez_compressed(
            path,
            logs=np.concatenate([each.logs for each in heard]).astype(np.float16),
            sounds=np.concatenate([each.sounds for each in heard]),
            texts=np.array([each.text for each in heard]),
            frames=np.array([len(each.logs) for each in heard]),
        )


def test(recogniser: Recogniser, heard: list[Hearing], decoded: int, show: int = 0) -> dict[str, float]:
    """Shares of frames right, and of character and word errors of the first `decoded` utterances."""
    wrong, of, wrong_words, of_words = 0, 0, 0, 0
    right = sum(int((each.logs.argmax(1) == each.sounds).sum()) for each in heard)
    for count, each in enumerate(heard[:decoded]):
        wanted, found = recogniser.same(each.text), recogniser.same(recogniser.decoder(each.logs))
        if count < show:
            print(f"  {wanted} | {found}", flush=True)
        wrong, of = wrong + distance(wanted, found), of + len(wanted)
        wrong_words += distance(wanted.split(), found.split())
        of_words += len(wanted.split())
    shares = {
        "frames": right / max(1, sum(len(each.logs) for each in heard)),
        "characters": wrong / max(1, of),
        "words": wrong_words / max(1, of_words),
    }
    return {**{name: round(value, 4) for name, value in shares.items()}, "utterances": min(decoded, len(heard))}


def main() -> None:
    parser = training.arguments(__doc__, seconds=600.0, rate=2e-3)
    parser.add_argument("--batch", type=int, default=192, help="seconds of speech")
    parser.add_argument("--room", type=int, default=90_000, help="most seconds of speech")
    parser.add_argument("--report", type=float, default=60.0, help="seconds between two reports")
    parser.add_argument("--least", type=int, default=300, help="utterances to begin with")
    parser.add_argument("--texts", type=int, default=2000, help="of each kind, to learn from how words are said")
    parser.add_argument("--library", type=Path, help="directory of libflite's files; default: where the linker looks")
    parser.add_argument(
        "--test", type=Path, action="append", default=[], help="files of speech to be recognised at the end"
    )
    parser.add_argument(
        "--own",
        type=Path,
        action="append",
        default=[],
        help="files of its own voices, disguised, to tune the decoder on",
    )
    parser.add_argument("--most", type=int, default=200, help="utterances of each directory to hear")
    parser.add_argument("--decoded", type=int, default=200, help="utterances of each directory to find words in")
    options, device = training.parsed(parser), training.prepare(seed=0)
    # Beside the training's begin, which waits for the first files anyway.
    words = multiprocessing.get_context("spawn").Process(target=write_lexicon, args=(options,))
    words.start()
    train(options, device, words)
    words.join()
    if words.exitcode:
        raise SystemExit("no lexicon was written")
    recogniser = load(options.out, device)
    for directory in (*options.test, *options.own):
        name = "-".join(directory.parts[-2:])
        heard = hear(recogniser, directory, device, options.most, feigned=directory in options.own)
        keep(options.out / f"heard-{name}.npz", heard)
        say({"heard": name, **test(recogniser, heard, options.decoded, show=8)})


if __name__ == "__main__":
    main()
