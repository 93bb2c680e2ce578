"""Finds the weights of the recogniser's decoder on what the network heard of its own voices, which are others than the
one that it judges.

    python -m models.embedded.tune_recogniser RECOGNISER HEARD [HEARD ...] [--judge HEARD]

RECOGNISER is the directory of train_recogniser, HEARD are files that it wrote there. weighing.json is written beside
them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from models.embedded.voices.decoder import Decoder, Language, Phones, Weighing, homophones
from models.embedded.voices.recogniser import distance, load_phones, same
from models.embedded.voices.training import Clock, say

Heard = list[tuple[np.ndarray, str]]
"""Log-probabilities [frames, phones] and what was said."""
FACTORS = {"prior": (0.6, 1.5), "word": (0.6, 1.5), "rarity": (0.65, 1.6), "lengths": (0.5, 1.8)}
"""What a weight is tried to be changed by."""
SHARES = (0.5, 0.7, 0.8, 0.9, 0.95)
_state: tuple[Language, Phones, Heard]


def read(paths: Iterable[Path], most: int) -> Heard:
    """The first utterances of each file."""
    heard: Heard = []
    for path in paths:
        with np.load(path) as file:
            ends = file["frames"].cumsum()[:-1]
            logs = np.split(file["logs"].astype(np.float32), ends)
            heard += list(zip(logs, file["texts"].tolist(), strict=True))[:most]
    return heard


def _begin(language: Language, phones: Phones, heard: Heard) -> None:
    global _state
    _state = language, phones, heard


def _errors(weighing: Weighing, part: slice) -> tuple[int, int]:
    """Wrong words and words of a part of what was heard."""
    language, phones, heard = _state
    decoder, names = Decoder(language, phones, weighing), homophones(language.words)
    wrong = of = 0
    for logs, text in heard[part]:
        wanted = same(names, text).split()
        wrong, of = wrong + distance(wanted, same(names, decoder(logs)).split()), of + len(wanted)
    return wrong, of


def neighbours(weighing: Weighing) -> list[Weighing]:
    """Each weight changed by itself."""
    found = [
        dataclasses.replace(weighing, **{name: round(getattr(weighing, name) * factor, 4)})
        for name, factors in FACTORS.items()
        for factor in factors
    ]
    return found + [dataclasses.replace(weighing, kinds=share) for share in SHARES if share != weighing.kinds]


def climb(
    start: Weighing, errors: Callable[[list[Weighing]], list[float]], rounds: int
) -> Iterator[tuple[Weighing, float]]:
    """The best weights so far and their errors, at first and after each round that made them better: the best
    neighbour's change, or all changes that help by themselves."""
    best, least = start, errors([start])[0]
    yield best, least
    for _ in range(rounds):
        found = sorted(zip(errors(near := neighbours(best)), range(len(near)), strict=True))
        if found[0][0] >= least:
            break
        # Changes that help alone often help together.
        joined = best
        for value, index in reversed(found):
            # Of two changes of one weight the better one comes later.
            if value < least:
                changed = {k: v for k, v in vars(near[index]).items() if v != getattr(best, k)}
                joined = dataclasses.replace(joined, **changed)
        together = errors([joined])[0]
        best, least = (joined, together) if together <= found[0][0] else (near[found[0][1]], found[0][0])
        yield best, least


def tune(options: argparse.Namespace) -> None:
    language = Language.load(options.recogniser / "lexicon.json")
    phones = load_phones(options.recogniser)
    heard = read(options.heard, options.most)

    def measure(heard: Heard, asked: list[Weighing]) -> list[float]:
        """Share of wrong words under each weighing."""
        context, count = multiprocessing.get_context("fork"), options.cores
        with context.Pool(count, _begin, (language, phones, heard)) as pool:
            parts = pool.starmap(_errors, [(w, slice(n, None, count)) for w in asked for n in range(count)])
        sums = np.array(parts).reshape(len(asked), count, 2).sum(1)
        return [float(wrong / of) for wrong, of in sums]

    clock, best, usual = Clock(options.seconds), Weighing(), Weighing()
    for best, least in climb(usual, lambda asked: measure(heard, asked), options.rounds):
        values, goes_on = dataclasses.asdict(best), clock.running()
        say({"s": round(clock.spent, 1), "words": round(least, 4), **values})
        (options.recogniser / "weighing.json").write_text(json.dumps(values) + "\n", encoding="utf-8")
        if not goes_on:
            break
    for path in options.judge:
        before, after = measure(read([path], options.judged), [Weighing(), best])
        say({"judged": path.name, "before": round(before, 4), "after": round(after, 4)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recogniser", type=Path)
    parser.add_argument("heard", type=Path, nargs="+")
    parser.add_argument("--judge", type=Path, action="append", default=[], help="files that are only measured")
    parser.add_argument("--most", type=int, default=200, help="utterances of each file")
    parser.add_argument("--judged", type=int, default=500, help="utterances of each file that is only measured")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=600.0, help="no round begins later")
    parser.add_argument("--cores", type=int, default=1)
    tune(parser.parse_args())


if __name__ == "__main__":
    main()
