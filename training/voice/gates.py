"""Judges a voice: what the server's model speaks with its checkpoint and Flite's speech of the same texts, both through
the recogniser, for several seeds.

    python -m training.voice.gates models/embedded/voxcpm2 OUT --seeds 10 --sentences 500

Whether speech says its text from the beginning to the end: the phones of the text are followed through what the
recogniser's network hears, one after the other, with an option to jump to any other place at a cost. Which words a
listener would understand does not matter: a word that sounds like another one is followed through all the same.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, repeat
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from training.loop import device, hashes, say
from training.voice import corpus
from training.voice.corpus import Listener, Spoken, prepare
from training.voice.flite import PHONES, Flite
from training.voice.latents import FRAMES
from training.voice.recogniser import Phones, distance, down, plain
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
    """sentences: of the grammar, three words or more, no digits; words: strings of known words; unheard: words of
    the list among small words; numbers; first_words: what people type first, all of it; segments_400:
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
        "unheard": writer.mixed_string,
        "numbers": writer.numbered,
    }[kind]
    while len(found) < count:
        text = make()
        digits = any(character.isdigit() for character in text)
        if len(text.split()) >= 3 and digits == (kind == "numbers") and text not in found:
            found.append(text)
    return found


JUMP_COST = 10.0
"""In nats: of 4 to 32 what was tried on natural speech, as it is and with words left out or said twice."""
_PRIOR = 0.3
"""How much of a phone's frequency is taken away."""
_PAUSE = PHONES.index("pau")
_PAUSE_COST = 1.0
"""Of each frame of silence within the text, in nats."""
_JUMP = 2
"""Beside 1, a step from the state before, and 0, another frame in the same one."""


LEAST = 3
"""Phones of a part that counts: most words have more."""


@dataclass(frozen=True)
class Reading:
    """skipped, repeated: phones of the longest part of the text that was left out, and that was said again."""

    skipped: int
    repeated: int

    def faulty(self, length: int, natural: int) -> bool:
        """Whether a part is left out and the speech shorter for it, or said again and longer. Speech of natural length
        in which the path jumps is a word that sounds like another one, which is an error of its characters alone.
        length, natural: of the speech and of natural speech of the text, in any unit."""
        return (self.skipped >= LEAST and length < natural) or (self.repeated >= LEAST and length > natural)


def follow(heard: np.ndarray, text: np.ndarray, known: Phones) -> Reading:
    """heard: log-probabilities [frames, phones]; text [n]: its phones, whose pauses do not matter."""
    phones = np.concatenate(([_PAUSE], text[text != _PAUSE], [_PAUSE]))
    # A phone has as many states as frames that it lasts at least; in the last one it may stay.
    phone_of = np.repeat(np.arange(len(phones)), known.least[phones])
    firsts = np.flatnonzero(np.diff(phone_of, prepend=-1))
    lasts = np.append(firsts[1:], len(phone_of)) - 1
    logs = heard - _PRIOR * np.log(known.frequency + 1e-4)
    emitted = logs[:, phones[phone_of]]
    emitted[:, lasts] = np.maximum(emitted[:, lasts], logs[:, [_PAUSE]] - _PAUSE_COST)
    may_stay = np.full(len(phone_of), -np.inf)
    may_stay[lasts] = 0.0
    best = np.full(len(phone_of), -np.inf)
    best[0] = emitted[0, 0]
    ways = np.zeros(emitted.shape, np.int8)
    ends = np.zeros(len(emitted), np.int64)
    """The phone from whose end a jump at that frame comes."""
    for moment in range(1, len(emitted)):
        ways[moment, 1:] = best[:-1] > best[1:] + may_stay[1:]
        reached = np.maximum(best + may_stay, np.concatenate(([-np.inf], best[:-1])))
        ends[moment] = best[lasts].argmax()
        jumped = best[lasts[ends[moment]]] - JUMP_COST
        far = firsts[reached[firsts] < jumped]
        reached[far], ways[moment, far] = jumped, _JUMP
        best = reached + emitted[moment]
    said = _said(best, phone_of, lasts, ways, ends)[1:-1]
    return Reading(_longest(said == 0), _longest(said > 1))


def _said(best: np.ndarray, phone_of: np.ndarray, lasts: np.ndarray, ways: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """How often each phone was gone through. From the end of the text, or from where it was left if that costs less."""
    left = int(best[lasts].argmax())
    state = int(lasts[left] if best[lasts[left]] - JUMP_COST > best[lasts[-1]] else lasts[-1])
    said = np.zeros(len(lasts), np.int64)
    said[phone_of[state]] = 1
    for moment in range(len(ways) - 1, 0, -1):
        here, jumped = phone_of[state], ways[moment, state] == _JUMP
        state = int(lasts[ends[moment]]) if jumped else state - int(ways[moment, state])
        said[phone_of[state]] += jumped or phone_of[state] != here
    return said


def _longest(marked: np.ndarray) -> int:
    """Most in a row."""
    ends = np.flatnonzero(np.diff(marked.astype(np.int8), prepend=0, append=0))
    return int(np.diff(ends)[::2].max(initial=0))


@dataclass(frozen=True)
class Heard:
    """What was heard of speech: words, and how its phones are followed."""

    words: str
    reading: Reading


@dataclass(frozen=True)
class Take:
    """One sentence: what should be heard, what was heard of it as generated, patches, and whether it ended by itself;
    the same of natural speech."""

    spoken: str
    heard: Heard
    patches: int
    stopped: bool
    natural_heard: Heard
    natural_patches: int

    @property
    def repeats_or_skips(self) -> bool:
        return self.heard.reading.faulty(self.patches, self.natural_patches)


def score(takes: list[Take], natural_words: float = 0.05) -> dict[str, float | bool]:
    """Shares of characters and words, not percents; lengths are those of generated over natural speech; passed: the
    gates of the model's card, with at most so many words of natural speech wrong."""

    def errors(heard: list[str], words: bool) -> float:
        wanted = [plain(take.spoken) for take in takes]
        pairs = [(w.split(), h.split()) if words else (w, h) for w, h in zip(wanted, heard, strict=True)]
        return sum(distance(w, h) for w, h in pairs) / sum(len(w) for w, _ in pairs)

    generated, natural = [take.heard.words for take in takes], [take.natural_heard.words for take in takes]
    ratios = sorted(take.patches / take.natural_patches for take in takes)
    count = len(takes)
    found = {
        "sentences": count,
        "characters": errors(generated, False),
        "natural_characters": errors(natural, False),
        "words": errors(generated, True),
        "natural_words": errors(natural, True),
        "faultless": sum(plain(take.spoken) == take.heard.words for take in takes) / count,
        "stop_failures": sum(not take.stopped for take in takes) / count,
        "repeats_and_skips": sum(take.repeats_or_skips for take in takes) / count,
        "length": sum(take.patches for take in takes) / sum(take.natural_patches for take in takes),
        "shortest": ratios[0],
        "longest": ratios[-1],
    }
    passed = (
        found["natural_words"] <= natural_words
        and found["characters"] <= found["natural_characters"] + 0.03
        and found["stop_failures"] < 0.005
        and found["repeats_and_skips"] < 0.01
        and 0.85 <= found["length"] <= 1.15
    )
    return {**{name: round(value, 4) for name, value in found.items()}, "passed": passed}


class Judge:
    def __init__(self, options: argparse.Namespace) -> None:
        self._device = device()
        self.recogniser = load_recogniser(self._device)
        self.served = Served(options.checkpoint)
        self.speaker, self._listener = Flite("slt", options.library), Listener()

    def wave(self, samples: np.ndarray) -> Tensor:
        return torch.from_numpy(samples).to(self._device).float() / 32768.0

    def hear(self, wave: Tensor, sounds: np.ndarray) -> Heard:
        """sounds: phones of natural speech of the text, frame by frame."""
        each_once = sounds[np.flatnonzero(np.diff(sounds.astype(int), prepend=-1))]
        reading = follow(self.recogniser.phones(wave), each_once, self.recogniser.known)
        return Heard(self.recogniser(wave), reading)

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
    options = parser.parse_args()
    results: dict[str, object] = {"sha256": hashes(*sorted(options.checkpoint.glob("*.safetensors")))}

    def report(name: str, values: dict[str, float | bool]) -> None:
        results[name] = values
        say({name: values})
        options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    measure(Judge(options), options, report)


if __name__ == "__main__":
    main()
