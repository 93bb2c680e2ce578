"""Judges a voice: what the server's model speaks with its checkpoint and Flite's speech of the same texts, both through
the recogniser, for several seeds.

    python -m training.voice.gates models/embedded/voxcpm2 OUT --seeds 10 --sentences 500
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, repeat
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from training.loop import device, hashes, say
from training.voice import corpus
from training.voice.corpus import Listener, Spoken, prepare
from training.voice.flite import Flite
from training.voice.gauge import Heard, Take, follow, one_each, score, wrong_phones
from training.voice.latents import FRAMES
from training.voice.recogniser import down
from training.voice.recogniser import load as load_recogniser
from training.voice.served import Prompt, Served, Speech
from training.voice.texts import FIRST_WORDS, Shares, Writer, dictionary

HELD_OUT = 900_000_017
"""Seed of the sentences; those of the training are below a hundred million."""
MODES = ("plain", "described", "reference", "continuation")
SEEDED = ("sentences", "first_words", "segments_400")
"""Kinds that are judged for each seed."""
NATURAL_WORDS = {"first_words": 0.15}
"""Of natural speech the most words wrong, where it is not 0.05: a word alone tells little of itself."""
_TOGETHER = 256
"""Prompts in one batch."""
Report = Callable[[str, dict[str, float | bool]], None]


def texts(kind: str, count: int, other: tuple[str, ...]) -> list[str]:
    """sentences: of the grammar, three words or more, no digits; words: strings of known words; other, unheard:
    of words of the list among small words; numbers; first_words: what people type first, all of it; segments_400:
    sentences in a row, a fifth of `count`."""
    if kind == "first_words":
        return list(FIRST_WORDS)
    writer = Writer(HELD_OUT, other)
    if kind == "segments_400":
        only = Shares(known_words=0.0, other_words=0.0, numbers=0.0, first_words=0.0, long=0.0)
        long = (writer.long(only, least=300) for _ in repeat(None))
        return list(islice((text for text in long if not re.search("[0-9]", text)), count // 5))
    found: list[str] = []
    make = {
        "sentences": writer.sentence,
        "words": writer.known_words,
        "other": writer.mixed_string,
        "unheard": writer.mixed_string,
        "numbers": writer.numbered,
    }[kind]
    while len(found) < count:
        text = make()
        digits = any(character.isdigit() for character in text)
        if len(text.split()) >= 3 and digits == (kind == "numbers") and text not in found:
            found.append(text)
    return found


class Judge:
    def __init__(self, options: argparse.Namespace) -> None:
        self._device = device()
        self.recogniser = load_recogniser(self._device)
        self.served = Served(options.checkpoint, cfg=options.cfg, steps=options.steps, temperature=options.temperature)
        self.speaker, self._listener = Flite("slt", options.library), Listener()

    def wave(self, samples: np.ndarray) -> Tensor:
        return torch.from_numpy(samples).to(self._device).float() / 32768.0

    def hear(self, wave: Tensor, sounds: np.ndarray) -> Heard:
        """sounds: phones of natural speech of the text, frame by frame."""
        text, logs = one_each(sounds), self.recogniser.phones(wave)
        reading = follow(logs, text, self.recogniser.known)
        return Heard(self.recogniser(wave), reading, wrong_phones(logs, text))

    def natural(self, chosen: list[str]) -> tuple[list[Spoken], list[Heard]]:
        """Natural speech of texts, and what the recogniser hears of it."""
        spoken = [prepare(text, self.speaker.speak(text), self._listener) for text in chosen]
        return spoken, [self.hear(self.wave(clip.wave), clip.sounds) for clip in spoken]

    def takes(self, speeches: Iterable[Speech], natural: list[Spoken], heard: list[Heard]) -> Iterator[Take]:
        for speech, clip, natural_heard in zip(speeches, natural, heard, strict=True):
            wave = down(speech.samples[None].to(self._device))[0]
            yield Take(
                self.recogniser.same(clip.spoken),
                self.hear(wave, clip.sounds),
                len(speech.patches),
                speech.stopped,
                natural_heard,
                len(clip.span),
            )

    def speak(self, mode: str, chosen: list[str], natural: list[Spoken], seed: int) -> Iterator[Speech]:
        """The clip of a reference or continuation is the natural speech of the sentence before."""
        asked = []
        for index, text in enumerate(chosen):
            clip, front = natural[index - 1], "(a young woman, speaking softly)" if mode == "described" else ""
            none = torch.zeros(0, *self.served.model.patch_shape)
            patches = self.served.encode(clip.wave) if mode in MODES[2:] else none
            said = f"{clip.text} {text}" if mode == "continuation" else front + text
            limit = 6 * len(front + text) + 10
            asked.append(Prompt(said, patches, seed * 100_000 + index, limit, continued=mode == "continuation"))
        for start in range(0, len(asked), _TOGETHER):
            yield from self.served.speak(asked[start : start + _TOGETHER])


def own_latents(clip: Spoken) -> Tensor:
    return torch.from_numpy(clip.latents).float().unflatten(0, (-1, FRAMES))


def measure(judge: Judge, options: argparse.Namespace, report: Report) -> None:
    """Each mode of the first kind, the plain one of all, some for each seed; of the first kind also natural speech
    through the codec, and its latents through the decoder alone."""
    for kind in options.kinds:
        other = dictionary(options.words, unheard=kind == "unheard")
        chosen, first = texts(kind, options.sentences, other), kind == options.kinds[0]
        natural, heard = judge.natural(chosen)
        if first and not options.first_seed:
            for way, copy in (("codec", lambda clip: judge.served.encode(clip.wave)), ("decoder", own_latents)):
                copies = map(copy, natural)
                codec = (Speech(patches, judge.served.sound(patches), True) for patches in copies)
                report(f"{kind} {way}", score(list(judge.takes(codec, natural, heard))))
        for mode in options.modes if first else MODES[:1]:
            count = options.seeds if kind in SEEDED and mode == MODES[0] else 1
            for seed in range(options.first_seed, options.first_seed + count):
                done = list(judge.takes(judge.speak(mode, chosen, natural, seed), natural, heard))
                report(f"{kind} {mode} {seed}", score(done, NATURAL_WORDS.get(kind, 0.05)))
                for take in (take for take in done if take.repeats_or_skips):
                    print(f"  a repeat or a skip, seed {seed}: {take.spoken} | {take.heard.words}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("checkpoint", "out"):
        parser.add_argument(name, type=Path)
    corpus.source(parser)
    parser.add_argument("--kinds", nargs="+", default=["sentences", "first_words", "segments_400", "words", "unheard"])
    parser.add_argument("--modes", nargs="+", default=list(MODES))
    parser.add_argument("--sentences", type=int, default=500)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0, help="processes side by side take some seeds each")
    parser.add_argument("--cfg", type=float, default=2.0)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--temperature", type=float, default=1.0)
    options = parser.parse_args()
    results: dict[str, object] = {"sha256": hashes(*sorted(options.checkpoint.glob("*.safetensors")))}

    def report(name: str, values: dict[str, float | bool]) -> None:
        results[name] = values
        say({name: values})
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    measure(Judge(options), options, report)


if __name__ == "__main__":
    main()
