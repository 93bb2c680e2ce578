"""Others read the tokenizer of the embedded voice as the server does, and what it makes of texts."""

from __future__ import annotations

import random

import pytest
from transformers import AutoTokenizer

from models.interfaces.errors import InputError
from models.voxcpm2.processor import VoxCPM2Processor, load_processor
from tests.support.processes import ROOT

EMBEDDED = ROOT / "models/embedded/voxcpm2"
WRITTEN = (
    *("Hello there. The parcel is at the door.", "ALL CAPITALS, then none", "É"),
    *("Zoë Ångström's café: über-fein, ŁÓDŹ, naïve Ǻ", "Room 101, 7:45 (or 8?) on 24/12!"),
    *("5 % of 3 + 4 = 7 & more @ home", "‘quoted’ – dashed — long; cut…", "  Blanks  at\tthe\nends  "),
    *("(A low, calm voice)Good evening.", "Ⅷ ﬁne Ａ ß İ ı K Ω 你好 привет 😀", "A", "a"),
)
SIGNS = "abcxyzABCXYZ ÄÖÜäöüßÉéÈèñÑçÇøØŠšŁłÅå0123456789 .,?!':()-/_ &%+=@–—;…‘’`´*#\"$<>\u00a0\u0301\u4f60"


def drawn(count: int) -> list[str]:
    generator = random.Random(20_260_101)
    return ["".join(generator.choices(SIGNS, k=generator.randint(1, 40))) for _ in range(count)]


def served(processor: VoxCPM2Processor, text: str) -> list[int]:
    try:
        return processor.tokenize(text)
    except InputError:
        return []  # nothing that can be spoken


@pytest.mark.slow
def test_transformers_reads_the_tokenizer_as_the_server_does() -> None:
    processor, other = load_processor(EMBEDDED), AutoTokenizer.from_pretrained(EMBEDDED)
    texts = [*WRITTEN, *drawn(400)]
    assert sum(bool(served(processor, text)) for text in texts) > 400
    for text in texts:
        ids = served(processor, text)
        assert other(text, add_special_tokens=False).input_ids == ids, text
        assert other(text).input_ids == ids, text


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("Hello, the red fox costs 42 dollars!", "hello, the red fox costs 42 dollars!"),
        ("  Café —\n two  (2)", "cafe , two (2)"),
        ("Zoë Ångström", "zoe angstrom"),
        ("50% of x & y", "50 percent of x and y"),
        ("don’t 你好 \U0001f600 go", "don't go"),
    ],
)
def test_what_is_spoken_of_a_text(text: str, meant: str) -> None:
    processor = load_processor(EMBEDDED)
    assert processor.tokenize(text) == processor.tokenize(meant)


def test_letters_and_signs_that_are_left_out_are_named() -> None:
    processor = load_processor(EMBEDDED)
    assert processor.unspoken('50% of x & y = 5 + (2), "so" [I] think… `it\'s` - a/b_c') == ""
    assert processor.unspoken("C# ~ $ 5 * √2 # Łódź 你") == "#~$*√Ł你"
