"""Adds the words that people type first to the recogniser's lexicon: how Flite says them, and what follows what.

python -m training.voice.lexicon --library DIR
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path

from training.voice import corpus
from training.voice.flite import PHONES, Flite
from training.voice.recogniser import DIRECTORY, START, Entry, Language, plain
from training.voice.texts import FIRST_WORDS

WEIGHT = 60
"""How often each text counts: the lexicon's other counts are of some 40,000 texts."""


def learn(language: Language, speaker: Flite, texts: tuple[str, ...]) -> Language:
    """The words of the texts as the front end of a voice says them; it is the same for all of Flite's voices."""
    words, follows = dict(language.words), {kind: Counter(after) for kind, after in language.follows.items()}
    for text in texts:
        said, before = speaker.speak(text), START
        names = plain(said.spoken).split()
        if len(names) != len(text.split()):
            # A word of several, such as initials, whose parts are words of other texts.
            continue
        for number, name in enumerate(names):
            way = [PHONES[phone] for phone in said.phones[said.words == number]]
            entry = words.get(name) or Entry([], 0, name)
            ways = entry.ways if way in entry.ways else [*entry.ways, way]
            words[name] = replace(entry, ways=ways, count=entry.count + 1)
            follows.setdefault(before, Counter())[entry.kind] += WEIGHT
            before = entry.kind
        follows.setdefault(before, Counter())[START] += WEIGHT
    return Language(dict(sorted(words.items())), {kind: dict(sorted(after.items())) for kind, after in follows.items()})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    corpus.source(parser)
    parser.add_argument("--lexicon", type=Path, default=DIRECTORY / "lexicon.json")
    options = parser.parse_args()
    language = learn(Language.load(options.lexicon), Flite("kal16", options.library), FIRST_WORDS)
    words = {word: asdict(entry) for word, entry in language.words.items()}
    options.lexicon.write_text(json.dumps({"words": words, "follows": language.follows}) + "\n", encoding="utf-8")
    print(f"{len(words)} words")


if __name__ == "__main__":
    main()
