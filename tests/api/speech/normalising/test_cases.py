"""What is spoken for a text, case by case, and in chunks as for the whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.api.spoken_text.markup import MarkupStripper
from service.api.spoken_text.normalising.text import TextNormaliser, normalise
from service.api.spoken_text.passages import marked_passages
from service.api.spoken_text.text_cleaning import clean_text


def spoken(text: str) -> str:
    """As script.py reads a whole text."""
    return clean_text(normalise("".join(said for _, said in marked_passages(text, markup=True)[0].parts))).strip()


def spoken_live(text: str, size: int) -> str:
    stripper, normaliser = MarkupStripper(), TextNormaliser()
    parts = [normaliser.feed(stripper.feed(text[at : at + size])) for at in range(0, len(text), size)]
    parts += [normaliser.feed(stripper.flush()), normaliser.flush()]
    return clean_text("".join(parts)).strip()


@pytest.mark.parametrize(("language", "fewest"), [("english", 400), ("chinese", 300)])
def test_what_is_spoken(language: str, fewest: int) -> None:
    lines = (Path(__file__).parent / f"{language}.tsv").read_text("utf-8").splitlines()
    cases = [line.split("\t") for line in lines if "\t" in line]
    assert len(cases) >= fewest
    wrong = []
    for written, expected in cases:
        text = written.replace("\\n", "\n")
        heard = {"whole": spoken(text), **{f"in pieces of {size}": spoken_live(text, size) for size in (1, 3)}}
        wrong += [f"{written!r} {how}: {said!r}, not {expected!r}" for how, said in heard.items() if said != expected]
    assert not wrong, "\n".join(wrong)
