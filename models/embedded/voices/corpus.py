"""Spoken texts in files of a few dozen utterances each, made by processes beside the training.

python -m models.embedded.voices.corpus DIRECTORY --library DIR --words FILE --seed 1 --files 100
"""

from __future__ import annotations

import argparse
import os
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from models.embedded.voices import flite, rhvoice
from models.embedded.voices.alignment import Dubbed
from models.embedded.voices.flite import Flite, Utterance
from models.embedded.voices.gauge import exchanged
from models.embedded.voices.latents import DELAY, FRAMES, HOP, PATCH, SAMPLE_RATE, Basis, Spectrum, pitch_track
from models.embedded.voices.rhvoice import RHVoice
from models.embedded.voices.sentences import Shares, Writer
from models.embedded.voices.words import dictionary

LEAD = 0.06
"""Seconds of silence that stay in front of speech."""
PER_FILE = 48


@dataclass(frozen=True, eq=False)
class Spoken:
    """One utterance, cut and padded to whole patches.

    wave int16 [patches * PATCH], or empty when none was asked for; latents float16 [frames, LATENT_DIM]; phones uint8
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

    def __init__(self, basis: Path) -> None:
        device = torch.device("cpu")
        self._spectrum, self._basis = Spectrum(device), Basis.load(basis, device)

    def __call__(self, wave: np.ndarray, pitch: np.ndarray) -> np.ndarray:
        """wave int16 [frames * HOP], pitch as pitch_track has it -> float16 [frames, LATENT_DIM]."""
        track = torch.from_numpy(pitch)
        mel = self._spectrum(torch.from_numpy(wave).float() / 32768.0, track[:, 0].exp())
        return self._basis.latents(mel, track).half().numpy()


def prepare(text: str, said: Utterance, listener: Listener, keep_wave: bool) -> Spoken:
    start = max(0.0, float(said.ends[0]) - LEAD) if said.phones[0] == 0 else 0.0
    wave = said.samples[int(start * SAMPLE_RATE) :]
    wave = np.pad(wave, (0, -len(wave) % PATCH))
    frames = len(wave) // HOP
    # What a frame sounds is DELAY behind it.
    centres = (np.arange(frames) * HOP + HOP / 2 - DELAY) / SAMPLE_RATE + start
    at = np.clip(np.searchsorted(said.ends, centres), 0, len(said.ends) - 1)
    halves = (np.arange(2 * frames) + 0.5) * (HOP / 2 / SAMPLE_RATE) + start
    fine = np.clip(np.searchsorted(said.ends, halves), 0, len(said.ends) - 1)
    return Spoken(
        text,
        said.spoken,
        wave if keep_wave else wave[:0],
        listener(wave, pitch_track(said.pitch, flite.PITCH_SECONDS, start, frames)),
        said.phones[at].astype(np.uint8),
        said.phones[fine].astype(np.uint8),
        _spans(text, said, at),
    )


def _spans(text: str, said: Utterance, at: np.ndarray) -> np.ndarray:
    """at: number of the phone in each frame -> the characters of each patch."""
    begins, ends = _characters(text, said)
    groups = at.reshape(-1, FRAMES)
    return np.stack((begins[groups].min(1), ends[groups].max(1)), axis=1).astype(np.int16)


def _characters(text: str, said: Utterance) -> tuple[np.ndarray, np.ndarray]:
    """First and end character of each phone: its share of its word, and one more on either side."""
    words, position = [], 0
    for word in text.split(" "):
        words.append((position, position + len(word)))
        position += len(word) + 1
    count = len(said.phones)
    begins, ends = np.zeros(count, np.int64), np.zeros(count, np.int64)
    last = 0
    for index in range(count):
        number = int(said.words[index])
        if number < 0 or number >= len(words):
            begins[index], ends[index] = max(0, last - 2), min(len(text), last + 2)
            continue
        begin, end = words[number]
        of_word = np.flatnonzero(said.words == number)
        share = (end - begin) / len(of_word)
        place = index - int(of_word[0])
        begins[index] = max(0, begin + int(place * share) - 1)
        ends[index] = min(len(text), begin + int(np.ceil((place + 1) * share)) + 1)
        last = end
    return begins, ends


def write(path: Path, utterances: list[Spoken]) -> None:
    """Whole or not at all: readers look for the file while it is being made."""
    hidden = path.with_suffix(".part")
    with hidden.open("wb") as file:
        arrays = {
            key: np.concatenate([getattr(u, key) for u in utterances])
            for key in ("wave", "latents", "phones", "sounds", "span")
        }
        arrays["texts"] = np.array([u.text for u in utterances])
        arrays["spoken"] = np.array([u.spoken for u in utterances])
        arrays["patches"] = np.array([len(u.span) for u in utterances], np.int64)
        np.savez(file, allow_pickle=False, **arrays)
    hidden.rename(path)


@dataclass(frozen=True, eq=False)
class File:
    """The arrays of one file; of utterance i: patches[i] patches behind those of the utterances before it."""

    texts: list[str]
    spoken: list[str]
    patches: np.ndarray
    wave: np.ndarray
    latents: np.ndarray
    phones: np.ndarray
    sounds: np.ndarray
    span: np.ndarray


def read(path: Path) -> File:
    with np.load(path) as file:
        rest = {key: file[key] for key in ("patches", "wave", "latents", "phones", "sounds", "span")}
        return File(file["texts"].tolist(), file["spoken"].tolist(), **rest)


class Reader:
    """New files of a directory, in order of their names."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._seen: set[str] = set()

    def new(self) -> Iterator[Path]:
        for name in sorted(entry.name for entry in os.scandir(self._directory) if entry.name.endswith(".npz")):
            if name not in self._seen:
                self._seen.add(name)
                yield self._directory / name


def speaker_of(options: argparse.Namespace) -> Flite | Dubbed:
    if options.voice not in rhvoice.VOICES:
        return Flite(options.voice, options.library)
    # Of Flite's voices rms is the most like them in its times.
    return Dubbed(RHVoice(options.voice, options.rhvoice), Flite("rms", options.library))


def vary(speaker: Flite | Dubbed, drawn: random.Random) -> None:
    """Another pitch and tempo."""
    if isinstance(speaker, Dubbed):
        speaker.other.set(rate=drawn.uniform(0.8, 1.2), pitch=drawn.uniform(0.85, 1.15))
        return
    speaker.set("int_f0_target_mean", drawn.uniform(90.0, 220.0))
    speaker.set("duration_stretch", drawn.uniform(0.85, 1.2))


def make(options: argparse.Namespace) -> None:
    """Files whose texts depend on the seed alone."""
    torch.set_num_threads(1)
    speaker, other = speaker_of(options), dictionary(options.words)
    listener = Listener(options.basis)
    shares = Shares(echoes=options.echoes)
    if options.grammar or options.strings:
        shares = Shares(1.0 if options.strings else 0.0, 0.0, 0.0)
    for number in range(options.files):
        writer = Writer(options.seed * 100_003 + number, other)
        if options.varied:
            vary(speaker, writer.random)
        texts = [writer.text(shares) for _ in range(PER_FILE)]
        if options.exchanged:
            texts[1::2] = [exchanged(text, writer.random) for text in texts[1::2]]
        waves = number < options.waves
        spoken = [prepare(text, speaker.speak(text), listener, waves) for text in texts]
        write(options.directory / f"{number:05d}-{options.seed:05d}.npz", spoken)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--library", type=Path, help="directory of libflite's files; default: where the linker looks")
    parser.add_argument("--words", type=Path, default=Path("/usr/share/dict/american-english-small"))
    parser.add_argument("--basis", type=Path, default=Path(__file__).parent / "basis.npz")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--files", type=int, default=1)
    parser.add_argument("--waves", type=int, default=0, help="files that hold the samples, too")
    parser.add_argument("--voice", default="slt")
    parser.add_argument("--rhvoice", type=Path, default=Path("rhvoice"), help="directory of RHVoice, for bdl and clb")
    parser.add_argument("--varied", action="store_true", help="another pitch and tempo for each file (kal16, bdl, clb)")
    parser.add_argument("--grammar", action="store_true", help="sentences of known words alone")
    parser.add_argument("--strings", action="store_true", help="strings of known words alone")
    parser.add_argument("--echoes", type=float, default=0.0, help="share of texts with words that are alike")
    parser.add_argument("--exchanged", action="store_true", help="one word of every second text is another known one")
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    make(options)


if __name__ == "__main__":
    main()
