"""Texts of the embedded voice's training and gates; no Flite is needed."""

from __future__ import annotations

import numpy as np
import torch

from training.voice.corpus import Store
from training.voice.packing import Packer, Shape
from training.voice.recogniser import DIRECTORY, Language, plain
from training.voice.texts import FIRST_WORDS


def test_the_recogniser_knows_what_people_type_first() -> None:
    words = Language.load(DIRECTORY / "lexicon.json").words
    assert words.keys() >= set("abcdefghijklmnopqrstuvwxyz")
    assert {word for text in FIRST_WORDS for word in plain(text).split()} - words.keys() == {"gpu"}


def test_a_segment_of_400_characters_fits_a_row() -> None:
    """Also where a clip of 70 s is drawn, for which others are taken."""
    store = Store(4 * 640, torch.device("cpu"))
    for characters, patches in ((900, 440), (400, 180), (20, 10)):
        store.texts.append(np.zeros(characters, np.int16))
        store.first.append(sum(store.count))
        store.count.append(patches)
    batch = Packer(store, Shape(rows=40), seed=0).batch()
    assert (batch["documents"] == 0).sum(1).max() >= 580
