"""Spoken texts in files of a few dozen utterances each, made by processes beside the training, which reads them.

python -m training.voice.corpus DIRECTORY --library DIR --words FILE --seed 1 --files 100
"""

from __future__ import annotations

import argparse
import math
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from training.voice.config import tokens
from training.voice.flite import PITCH_SECONDS, SAMPLE_RATE, Flite, Utterance
from training.voice.latents import DELAY, FRAMES, HOP, LATENT_DIM, PATCH, Basis, Spectrum, pitch_track
from training.voice.texts import Shares, Writer, dictionary

LEAD = 0.06
"""Seconds of silence that stay in front of speech."""
PER_FILE = 48
WORDS = Path("/usr/share/dict/american-english-small")


@dataclass(frozen=True, eq=False)
class Spoken:
    """One utterance, cut and padded to whole patches.

    wave int16 [patches * PATCH]; latents float16 [frames, LATENT_DIM]; phones uint8
    [frames], of what the decoder sounds there; sounds uint8 [2 * frames], of the samples, 50 a second; span int16
    [patches, 2]: the part of the text, first and end character, that a patch speaks.
    """

    text: str
    spoken: str
    wave: np.ndarray
    latents: np.ndarray
    phones: np.ndarray
    sounds: np.ndarray
    span: np.ndarray


class Listener:
    """Latents of speech, on the CPU."""

    def __init__(self) -> None:
        device = torch.device("cpu")
        self._spectrum, self._basis = Spectrum(device), Basis.load(device)

    def __call__(self, wave: np.ndarray, pitch: np.ndarray) -> np.ndarray:
        """wave int16 [frames * HOP], pitch as pitch_track has it -> float16 [frames, LATENT_DIM]."""
        track = torch.from_numpy(pitch)
        mel = self._spectrum(torch.from_numpy(wave).float() / 32768.0, track[:, 0].exp())
        return self._basis.latents(mel, track).half().numpy()


def prepare(text: str, said: Utterance, listener: Listener) -> Spoken:
    start = max(0.0, float(said.ends[0]) - LEAD) if said.phones[0] == 0 else 0.0
    wave = said.samples[int(start * SAMPLE_RATE) :]
    wave = np.pad(wave, (0, -len(wave) % PATCH))
    frames = len(wave) // HOP
    # What a frame sounds is DELAY behind it.
    centres = (np.arange(frames) * HOP + HOP / 2 - DELAY) / SAMPLE_RATE + start
    at = np.clip(np.searchsorted(said.ends, centres), 0, len(said.ends) - 1)
    halves = (np.arange(2 * frames) + 0.5) * (HOP / 2 / SAMPLE_RATE) + start
    fine = np.clip(np.searchsorted(said.ends, halves), 0, len(said.ends) - 1)
    begins, ends = _characters(text, said)
    groups = at.reshape(-1, FRAMES)
    return Spoken(
        text,
        said.spoken,
        wave,
        listener(wave, pitch_track(said.pitch, PITCH_SECONDS, start, frames)),
        said.phones[at].astype(np.uint8),
        said.phones[fine].astype(np.uint8),
        np.stack((begins[groups].min(1), ends[groups].max(1)), axis=1).astype(np.int16),
    )


def _characters(text: str, said: Utterance) -> tuple[np.ndarray, np.ndarray]:
    """First and end character of each phone: its share of its word, and one more on either side."""
    spans = [match.span() for match in re.finditer(r"[^ ]+", text)]
    begins, ends, last = list[int](), list[int](), 0
    for number, phones in groupby(said.words.tolist()):
        count = len(list(phones))
        if not 0 <= number < len(spans):
            begins += [last - 2] * count
            ends += [last + 2] * count
            continue
        begin, last = spans[number]
        share = (last - begin) / count
        begins += [begin + int(place * share) - 1 for place in range(count)]
        ends += [begin + math.ceil((place + 1) * share) + 1 for place in range(count)]
    return np.clip(begins, 0, len(text)), np.clip(ends, 0, len(text))


def write(path: Path, utterances: list[Spoken], waves: bool = False) -> None:
    """Arrays of all utterances, one after the other, with their texts and numbers of patches."""
    keys = ("latents", "phones", "span", *(["wave"] if waves else []))
    arrays = {key: np.concatenate([getattr(u, key) for u in utterances]) for key in keys}
    patches = np.array([len(u.span) for u in utterances], np.int64)
    save(path, **arrays, texts=np.array([u.text for u in utterances]), patches=patches)


def save(path: Path, **arrays: np.ndarray) -> None:
    """Whole or not at all: readers look for the file while it is being made."""
    hidden = path.with_suffix(".part")
    with hidden.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
    hidden.rename(path)


class Reader:
    """New files of a directory, in order of their names."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._seen: set[str] = set()

    def take(self, most: int) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
        """Names and arrays of at most so many."""
        names = (entry.name for entry in os.scandir(self._directory) if entry.name.endswith(".npz"))
        for name in sorted(set(names) - self._seen)[:most]:
            self._seen.add(name)
            with np.load(self._directory / name) as file:
                yield name, dict(file)


class Store:
    """All utterances so far; latents, phones and, if wanted, samples on the device."""

    def __init__(self, frames: int, device: torch.device, *, waves: bool = False) -> None:
        self.wave = torch.zeros(frames * HOP * waves, dtype=torch.int16, device=device)
        self.latents = torch.zeros(frames, LATENT_DIM, dtype=torch.float16, device=device)
        self.phones = torch.zeros(frames, dtype=torch.uint8, device=device)
        self.span = np.zeros((frames // FRAMES, 2), np.int16)
        self.patches = 0
        self.texts: list[np.ndarray] = []
        self.first: list[int] = []
        self.count: list[int] = []

    @property
    def frames(self) -> int:
        return self.patches * FRAMES

    @property
    def hours(self) -> float:
        return self.frames / 90_000

    def take_in(self, reader: Reader, most: int) -> None:
        """New files, while there is room."""
        for _, file in reader.take(most):
            begin, end = self.frames, self.frames + len(file["latents"])
            if end > len(self.latents):
                return
            if len(self.wave):
                self.wave[begin * HOP : end * HOP] = torch.from_numpy(file["wave"])
            self.latents[begin:end] = torch.from_numpy(file["latents"])
            self.phones[begin:end] = torch.from_numpy(file["phones"])
            self.span[self.patches : end // FRAMES] = file["span"]
            self.texts += [np.array(tokens(text), np.int16) for text in file["texts"].tolist()]
            counts = file["patches"]
            self.first += (self.patches + np.cumsum(counts) - counts).tolist()
            self.count += counts.tolist()
            self.patches = end // FRAMES

    def crops(self, start: Tensor, frames: int) -> tuple[Tensor, Tensor]:
        """First frames [n] -> samples [n, frames * HOP] and latents [n, D, frames]."""
        samples = start[:, None] * HOP + torch.arange(frames * HOP, device=start.device)
        latents = self.latents[start[:, None] + torch.arange(frames, device=start.device)]
        return self.wave[samples].float() / 32768.0, latents.float().transpose(1, 2)


def make(options: argparse.Namespace) -> None:
    """Files whose texts depend on the seed alone."""
    torch.set_num_threads(1)
    options.directory.mkdir(parents=True, exist_ok=True)
    speaker, other, listener = Flite("slt", options.library), dictionary(options.words), Listener()
    shares = Shares(echoes=0.1)
    for number in range(options.files):
        writer = Writer(options.seed * 100_003 + number, other)
        texts = [writer.text(shares) for _ in range(PER_FILE)]
        spoken = [prepare(text, speaker.speak(text), listener) for text in texts]
        write(options.directory / f"{number:05d}-{options.seed:05d}.npz", spoken, options.waves)


def source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--library", type=Path, help="directory of libflite's files; default: where the linker looks")
    parser.add_argument("--words", type=Path, default=WORDS)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    source(parser)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--files", type=int, default=1)
    parser.add_argument("--waves", action="store_true", help="with their samples, for the codec")
    make(parser.parse_args())
