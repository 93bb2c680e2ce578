"""Trains the recogniser that judges the embedded voice, on files of models.embedded.voices.corpus of other voices.

python -m models.embedded.train_recogniser DATA OUT --seconds 600 --test DIRECTORY
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from models.embedded.voices import corpus
from models.embedded.voices.corpus import Reader
from models.embedded.voices.flite import PHONES, Flite
from models.embedded.voices.latents import PATCH
from models.embedded.voices.recogniser import WARPS, PhoneNet, Recogniser, distance, learn_words, load
from models.embedded.voices.sentences import Writer

_SAMPLES_A_SOUND = 320
_NOTHING = -100


class Utterances:
    """Waves and their phones, 50 a second."""

    def __init__(self) -> None:
        self._items: list[tuple[Tensor, Tensor]] = []
        self.counts = torch.zeros(len(PHONES))

    def __len__(self) -> int:
        return len(self._items)

    def take_in(self, reader: Reader) -> None:
        for path in reader.new():
            file = corpus.read(path)
            waves = torch.from_numpy(file.wave).split((file.patches * PATCH).tolist())
            sounds = torch.from_numpy(file.sounds).long().split((file.patches * (PATCH // _SAMPLES_A_SOUND)).tolist())
            self._items += zip(waves, sounds, strict=True)
            self.counts += torch.bincount(torch.from_numpy(file.sounds).long(), minlength=len(PHONES))

    def batch(self, count: int) -> tuple[Tensor, Tensor]:
        """Samples [count, T] and phones [count, T / 320], _NOTHING behind the end."""
        chosen = random.choices(self._items, k=count)
        waves = torch.nn.utils.rnn.pad_sequence([wave.float() / 32768.0 for wave, _ in chosen], batch_first=True)
        sounds = torch.nn.utils.rnn.pad_sequence(
            [sound for _, sound in chosen], batch_first=True, padding_value=_NOTHING
        )
        return waves, sounds


def disturb(wave: Tensor) -> Tensor:
    """A tilted spectrum and noise. [N, T] -> [N, T]."""
    tilt = (torch.rand(len(wave), 1, device=wave.device) - 0.3) * 0.9
    wave = wave - tilt * F.pad(wave, (1, 0))[:, :-1]
    power = wave.square().mean(1, keepdim=True).sqrt()
    return wave + torch.randn_like(wave) * power * 10 ** (-0.9 - 2.0 * torch.rand(len(wave), 1, device=wave.device))


def hidden(mel: Tensor) -> Tensor:
    """Some moments and bands are not heard (SpecAugment, arXiv:1904.08779)."""
    for _ in range(2):
        start, band = random.randrange(max(1, mel.shape[2] - 8)), random.randrange(mel.shape[1] - 5)
        mel[:, :, start : start + random.randrange(8)] = 0.0
        mel[:, band : band + random.randrange(5)] = 0.0
    return mel


def train(options: argparse.Namespace) -> None:
    begun = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    random.seed(0)
    torch.manual_seed(0)
    net, utterances, reader = PhoneNet().to(device), Utterances(), Reader(options.data)
    optimiser = torch.optim.AdamW(net.parameters(), lr=options.rate, weight_decay=0.02, betas=(0.9, 0.98))
    while len(utterances) < options.least:
        utterances.take_in(reader)
        time.sleep(0.5)
    steps, reported = 0, begun
    while (spent := time.monotonic() - begun) < options.seconds:
        for group in optimiser.param_groups:
            group["lr"] = min(1.0, (steps + 1) / 100) * options.rate * (1.0 - 0.99 * spent / options.seconds)
        waves, sounds = utterances.batch(options.batch)
        mel = net.features(disturb(waves.to(device)), random.randrange(WARPS))
        out = net(hidden(mel))
        loss = F.cross_entropy(out, sounds.to(device), ignore_index=_NOTHING)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()
        steps += 1
        if steps % 50 == 0:
            utterances.take_in(reader)
        if time.monotonic() - reported > 20:
            reported = time.monotonic()
            entry = {"s": round(spent, 1), "step": steps, "n": len(utterances), "loss": round(loss.item(), 4)}
            print(json.dumps(entry), flush=True)
    prior = utterances.counts / utterances.counts.sum()
    state = {name: value.half().cpu() for name, value in net.state_dict().items()}
    torch.save({**state, "prior": prior}, options.out / "phones.pt")


def write_lexicon(options: argparse.Namespace) -> None:
    """Words as the quick diphone voice says them: the front end is the same for all of Flite's voices."""
    writer = Writer(12_345)
    texts = [writer.sentence() for _ in range(options.texts)] + [writer.known_words() for _ in range(options.texts)]
    lexicon = {word: asdict(entry) for word, entry in learn_words(Flite("kal16", options.library), texts).items()}
    (options.out / "lexicon.json").write_text(json.dumps(lexicon) + "\n", encoding="utf-8")
    print(json.dumps({"words": len(lexicon)}), flush=True)


def test(recogniser: Recogniser, directory: Path, device: torch.device) -> dict[str, float]:
    """Character and word errors on the files of a directory."""
    wrong, of, wrong_words, of_words, count = 0, 0, 0, 0, 0
    for path in Reader(directory).new():
        file = corpus.read(path)
        waves = torch.from_numpy(file.wave).split((file.patches * PATCH).tolist())
        for wave, text, spoken in zip(waves, file.texts, file.spoken, strict=True):
            if any(character.isdigit() for character in text):
                continue
            wanted, heard = recogniser.same(spoken), recogniser(wave.to(device).float() / 32768.0)
            if count < 8:
                print(f"  {wanted} | {heard}", flush=True)
            wrong, of = wrong + distance(wanted, heard), of + len(wanted)
            wrong_words += distance(wanted.split(), heard.split())
            of_words, count = of_words + len(wanted.split()), count + 1
    return {"characters": wrong / max(1, of), "words": wrong_words / max(1, of_words), "utterances": count}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--batch", type=int, default=16, help="utterances")
    parser.add_argument("--least", type=int, default=300, help="utterances to begin with")
    parser.add_argument("--texts", type=int, default=3000, help="of each kind, to learn from how words are said")
    parser.add_argument("--library", type=Path, help="directory of libflite's files; default: where the linker looks")
    parser.add_argument(
        "--test", type=Path, action="append", default=[], help="files of speech to be recognised at the end"
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    write_lexicon(options)
    train(options)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for directory in options.test:
        print(json.dumps({"test": str(directory), **test(load(options.out, device), directory, device)}), flush=True)


if __name__ == "__main__":
    main()
