"""Grammars over the real tokenizers of every family: byte level, byte fallback, Kimi's ranks."""

from __future__ import annotations

import json
import random
from pathlib import Path

import jsonschema
import llguidance
import numpy as np
import pytest

from models.processor import ChatProcessor
from models.registry import family_of, resolve
from service.api.chat.grammar import json_schema_grammar
from service.engine.chat.guidance import build_tokenizer
from service.link.grammar_limits import LIMITS
from tests.support.schemas import random_schema

GOLDEN = Path(__file__).parents[2] / "golden"
EMBEDDED = Path(__file__).parents[3] / "models/embedded/qwen2_vl"
FAMILIES = [EMBEDDED, *sorted(path for path in GOLDEN.iterdir() if path.name not in ("voxcpm2", "world"))]


@pytest.mark.parametrize("directory", FAMILIES, ids=lambda path: path.parent.name + "-" + path.name)
def test_answers_fit_whatever_the_vocabulary_is(directory: Path) -> None:
    processor: ChatProcessor = resolve(family_of(directory).processor)(directory)
    size = processor.vocab_size
    tokenizer = build_tokenizer(processor, size)
    fitting = 0
    for seed in range(40, 60):
        schema = random_schema(random.Random(seed), depth=2)
        limits = llguidance.LLParserLimits(**LIMITS)
        matcher = llguidance.LLMatcher(tokenizer, json_schema_grammar(schema), log_level=0, limits=limits)
        tokens: list[int] = []
        numbers = np.random.default_rng(seed)
        while not matcher.is_stopped() and len(tokens) < 400:
            mask = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[:size]
            ends = [token for token in processor.stop_token_ids if token < size and mask[token]]
            assert not ends or matcher.is_accepting()
            token = int(numbers.choice(np.flatnonzero(mask)))
            if token in processor.stop_token_ids:
                break
            assert processor.detokenize([token]), f"token {token} has no text"
            assert matcher.consume_token(token)
            tokens.append(token)
        if matcher.is_accepting():
            fitting += 1
            value = json.loads(processor.detokenize(tokens))
            jsonschema.validate(value, schema, format_checker=jsonschema.FormatChecker())
    assert fitting > 12
