"""Tokenizers of published size."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tokenizers import Tokenizer

from benchmarks.checkpoints.tokenizers import PUBLISHED, grow_words
from service.cli.bench.traffic import WORDS, text
from tests.support.golden import GOLDEN

pytestmark = pytest.mark.slow


def test_a_word_is_a_token_of_the_grown_tokenizer_and_what_it_writes_reads_the_same() -> None:
    published = json.loads((GOLDEN / "qwen2_vl/tokenizer.json").read_text())
    grown = Tokenizer.from_str(json.dumps(grow_words(published, WORDS)))
    assert grown.get_vocab_size() == PUBLISHED
    for token in published["added_tokens"]:
        assert grown.token_to_id(token["content"]) == token["id"]
    assert len(grown.encode(" " + text(np.random.default_rng(0), 500)).ids) == 500
    words = [identifier for token, identifier in grown.get_vocab().items() if token.startswith("\u0120")]
    drawn = np.random.default_rng(1).choice(sorted(words), 300).tolist()
    assert grown.encode(grown.decode(drawn)).ids == drawn
