"""What is spoken for a text, case by case, and in chunks as for the whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.api.spoken_text.markup import clean_text
from service.api.spoken_text.normaliser import TextNormaliser
from service.api.spoken_text.passages import PassageReader
from service.api.spoken_text.writing import spoken_of


def spoken(text: str, size: int) -> str:
    passages, normaliser = PassageReader(ssml=False), TextNormaliser()
    said = ""
    for at in range(0, len(text), size):
        parts = passages.feed(text[at : at + size], final=at + size >= len(text))
        passage = spoken_of(part for part in parts if isinstance(part, tuple))
        said += spoken_of(normaliser.feed(passage, final=at + size >= len(text)))
    return clean_text(said).strip()


@pytest.mark.parametrize(("language", "fewest"), [("english", 400), ("chinese", 300)])
def test_what_is_spoken(language: str, fewest: int) -> None:
    lines = (Path(__file__).parent / f"{language}.tsv").read_text("utf-8").splitlines()
    cases = [line.split("\t") for line in lines if "\t" in line]
    assert len(cases) >= fewest
    wrong = []
    for written, expected in cases:
        text = written.replace("\\n", "\n")
        heard = {size: spoken(text, size) for size in (1, 3, len(text))}
        wrong += [
            f"{written!r} in pieces of {size}: {said!r}, not {expected!r}"
            for size, said in heard.items()
            if said != expected
        ]
    assert not wrong, "\n".join(wrong)
