"""What the recogniser learns from: files of a few dozen sounds each, made by processes beside the training, of texts
that training.hearing.gates does not ask.

    python -m training.hearing.sounds voices DIRECTORY --library DIR --words FILE --seed 1 --files 100

voices: Flite's rms, awb, kal16 and kal, at other rates and with other frequencies in each file; own: the embedded
voice, in each file with other settings and half of it behind a built-in voice; noise: what nobody says. Natural speech
of slt, whom the embedded voice copies, is never among them.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from training.loop import device
from training.voice import corpus, gates
from training.voice.config import PUBLISHED
from training.voice.flite import SAMPLE_RATE, Flite
from training.voice.recogniser import SOUND, down
from training.voice.served import Prompt, Served
from training.voice.texts import Shares, Writer, dictionary

UNKNOWN = 255
"""Instead of a phone where nobody knows which it is."""
VOICES = {"rms": SAMPLE_RATE, "awb": SAMPLE_RATE, "kal16": SAMPLE_RATE, "kal": SAMPLE_RATE // 2}
NOISES = ("hiss", "hum", "music", "keyboard", "babble", "silence")
SHARES = Shares(known_words=0.2, other_words=0.08, numbers=0.14, echoes=0.04)
PER_FILE, NOISES_PER_FILE, PER_BATCH = 48, 12, {"cpu": 64, "cuda": 384}
ASKED, _MOST_ASKED, _COMMON = ("sentences", "words", "numbers"), 500, 4000
_CLIP = 10 * SAMPLE_RATE
Sounds = tuple[str, np.ndarray, np.ndarray]
"""Text, empty for noise; samples int16 [n * SOUND]; phones uint8 [n]."""


def write(path: Path, sounds: list[Sounds]) -> None:
    texts, waves, phones = zip(*sounds, strict=True)
    arrays = {"wave": np.concatenate(waves), "sounds": np.concatenate(phones), "texts": np.array(texts)}
    corpus.save(path, samples=np.array([len(wave) for wave in waves]), **arrays)


def unknown(text: str, wave: np.ndarray) -> Sounds:
    """wave: of a peak that is cut down to below full scale."""
    wave = (wave * min(1.0, 32000.0 / (np.abs(wave).max() + 1e-9))).round().astype(np.int16)
    wave = np.pad(wave, (0, -len(wave) % SOUND))
    return text, wave, np.full(len(wave) // SOUND, UNKNOWN, np.uint8)


def words(text: str) -> list[str]:
    return re.sub(r"[^a-z0-9' ]+", " ", text.lower()).split()


def plain(text: str) -> str:
    return f" {' '.join(words(text))} "


def asked(kind: str, other: tuple[str, ...]) -> list[str]:
    """What the gates ask: new texts, as what is said so often that it should be learned is left out."""
    writer = Writer(0, other)
    common = "".join(plain(writer.text(SHARES)) for _ in range(_COMMON))
    return [text for text in gates.texts(kind, _MOST_ASKED, other) if plain(text) not in common]


def resampled(wave: np.ndarray, ratio: float) -> np.ndarray:
    """float [n] -> float [n * ratio], band-limited."""
    count = max(2, round(len(wave) * ratio))
    spectrum = np.fft.rfft(wave)[: count // 2 + 1]
    return np.fft.irfft(np.pad(spectrum, (0, count // 2 + 1 - len(spectrum))), count) * (count / len(wave))


class Maker:
    def __init__(self, options: argparse.Namespace) -> None:
        self._options, self._other = options, dictionary(options.words)
        self._speakers = {name: Flite(name, options.library) for name in VOICES}
        self._asked = {plain(text) for kind in ASKED for text in asked(kind, self._other)}

    def _text(self, writer: Writer) -> str:
        """What the gates ask is no part of it."""
        texts = iter(lambda: writer.text(SHARES), "")
        return next(text for text in texts if not any(map(plain(text).__contains__, self._asked)))

    def voices(self, seed: int) -> list[Sounds]:
        """One voice at one rate, with all frequencies moved by one factor."""
        writer, random = Writer(seed, self._other), np.random.default_rng(seed)
        name, stretch, shift = random.choice(list(VOICES)), random.uniform(0.8, 1.25), np.exp(random.uniform(-0.2, 0.2))
        self._speakers[name].set("duration_stretch", stretch * shift)
        made = []
        for _ in range(PER_FILE):
            said = self._speakers[name].speak(text := self._text(writer))
            _, wave, phones = unknown(text, resampled(said.samples.astype(float), SAMPLE_RATE / VOICES[name] / shift))
            middles = (np.arange(len(phones)) + 0.5) * SOUND / SAMPLE_RATE * shift
            at = np.clip(np.searchsorted(said.ends, middles), 0, len(said.ends) - 1)
            made.append((text, wave, said.phones[at].astype(np.uint8)))
        return made

    def own(self, seed: int) -> list[Sounds]:
        writer, random = Writer(seed, self._other), np.random.default_rng(seed)
        texts = [self._text(writer) for _ in range(PER_BATCH[self._options.device.type])]
        with np.load(PUBLISHED / "built_in_voices.npz") as voices:
            references = [voices[name] for name in random.choice(voices.files, len(texts) // 2)]
        served = Served(PUBLISHED, cfg=random.uniform(1.5, 2.5), temperature=random.uniform(0.7, 1.1))
        return self.spoken(texts, seed, served, *references)

    def spoken(self, texts: list[str], seed: int, served: Served | None = None, *behind: np.ndarray) -> list[Sounds]:
        """By the server's own model, the first texts behind references: those that it says to their ends."""
        served = served or Served(PUBLISHED)
        none = [torch.zeros(0, *served.model.patch_shape)] * (len(texts) - len(behind))
        numbered = enumerate(zip(texts, [*map(torch.from_numpy, behind), *none], strict=True), seed)
        prompts = [Prompt(text, front, number, 6 * len(text) + 10) for number, (text, front) in numbered]
        said = zip(texts, served.speak(prompts), strict=True)
        return [unknown(t, 32767.0 * down(s.samples[None])[0].float().cpu().numpy()) for t, s in said if s.stopped]

    def noise(self, seed: int, kinds: tuple[str, ...] = NOISES) -> list[Sounds]:
        self.random, self._writer = np.random.default_rng(seed), Writer(seed)
        return [unknown("", getattr(self, kinds[n % len(kinds)])()) for n in range(NOISES_PER_FILE)]

    def hiss(self) -> np.ndarray:
        """White to brown, now and then moving."""
        spectrum = np.fft.rfft(self.random.standard_normal(_CLIP))
        wave = np.fft.irfft(spectrum * (np.arange(len(spectrum)) + 20.0) ** -self.random.uniform(0.0, 1.3), _CLIP)
        moving = 1.0 + self.random.uniform(0, 1) * np.sin(self._phase(self.random.uniform(0.1, 6.0)))
        return 6000.0 * wave / wave.std() * moving

    def hum(self) -> np.ndarray:
        """A tone with its harmonics that stays, glides, or comes and goes."""
        glide = np.exp(self.random.choice((0.0, self.random.uniform(-1.0, 1.0))) * np.linspace(0.0, 1.0, _CLIP))
        wave = self._tone(self._phase(self.random.uniform(40.0, 900.0) * glide), self.random.integers(2, 9))
        pulses = np.sin(self._phase(self.random.uniform(0.2, 5.0))) > self.random.uniform(-2.0, 0.5)
        return 6000.0 * wave * pulses + 0.02 * self.hiss()

    def music(self) -> np.ndarray:
        """Chords and notes that fade."""
        wave, at, seconds = np.zeros(2 * _CLIP), 0, self.random.uniform(0.12, 0.8)
        time, decay = np.arange(2 * SAMPLE_RATE) / SAMPLE_RATE, self.random.uniform(1.0, 8.0)
        while at < _CLIP:
            for key in self.random.integers(-24, 24, self.random.integers(1, 5)):
                note = self._tone(2 * np.pi * 261.6 * 2.0 ** (key / 12) * time, 6)
                wave[at : at + len(time)] += 3000.0 * note * np.exp(-decay * time)
            at += int(seconds * SAMPLE_RATE * self.random.choice((0.5, 1.0, 1.0, 2.0)))
        return wave[:_CLIP]

    def keyboard(self) -> np.ndarray:
        """Clicks and knocks."""
        wave, at = 0.01 * self.hiss(), 0
        while at < _CLIP - 4000:
            length, width = self.random.integers(80, 4000), self.random.integers(1, 20)
            knock = self.random.standard_normal(length) * np.exp(-np.linspace(0.0, 7.0, length))
            knock = np.convolve(knock, np.ones(width) / width**0.5, "same")
            wave[at : at + length] += self.random.uniform(1000.0, 8000.0) * knock
            at += int(SAMPLE_RATE * self.random.exponential(0.15)) + 500
        return wave

    def babble(self) -> np.ndarray:
        """Four to seven people who talk at once."""
        wave = np.zeros(_CLIP)
        for _ in range(self.random.integers(4, 8)):
            speaker = self._speakers[("kal16", "rms", "awb")[self.random.integers(3)]]
            shift, said = np.exp(self.random.uniform(-0.25, 0.25)), np.zeros(0)
            while len(said) < 1.2 * _CLIP:
                one = speaker.speak(self._writer.sentence()).samples.astype(float)
                said = np.concatenate((said, resampled(one, 1.0 / shift)))
            wave += np.roll(said, self.random.integers(len(said)))[:_CLIP]
        return 0.4 * wave

    def silence(self) -> np.ndarray:
        """Nothing, or the last bit of a converter."""
        return self.random.integers(0, 2) * self.random.integers(-1, 2, _CLIP).astype(float)

    def _tone(self, phase: np.ndarray, harmonics: int | np.integer[Any]) -> np.ndarray:
        return np.sum([np.sin(n * phase) * self.random.uniform(0, 1) / n for n in range(1, harmonics)], axis=0)

    def _phase(self, hertz: np.ndarray | float) -> np.ndarray:
        cycles = np.cumsum(np.broadcast_to(hertz, _CLIP)) / SAMPLE_RATE
        return 2 * np.pi * (cycles + self.random.random())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("voices", "own", "noise"))
    parser.add_argument("directory", type=Path)
    corpus.source(parser)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--files", type=int, default=1)
    parser.add_argument("--device", type=torch.device, default=device())
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    make: Callable[[int], list[Sounds]] = getattr(Maker(options), options.kind)
    for number in range(options.files):
        made = make(options.seed * 100_003 + number)
        write(options.directory / f"{options.kind}-{number:05d}-{options.seed:05d}.npz", made)
