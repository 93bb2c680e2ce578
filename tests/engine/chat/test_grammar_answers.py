"""Whatever is drawn from masks fits the schema, as an independent validator says, and ends where the grammar ends."""

from __future__ import annotations

import json
import random

import jsonschema
import llguidance
import numpy as np
import pytest

from service.api.structured.grammar import json_schema_grammar
from service.api.structured.schema_values import Unfit
from service.engine.chat.guided.matchers import build_tokenizer
from service.link.grammar_limits import LIMITS
from tests.support.grammars import check_grammar
from tests.support.schemas import random_schema
from tests.support.tiny_chat import END_TOKEN, VOCABULARY, tiny_processor, tiny_text

MOST_TOKENS = 600
TOKENIZER = build_tokenizer(tiny_processor(), VOCABULARY)


def drawn(grammar: str, seed: int) -> str | None:
    """An answer drawn by random logits; None where it does not end."""
    limits = llguidance.LLParserLimits(**LIMITS)
    matcher = llguidance.LLMatcher(TOKENIZER, grammar, log_level=0, limits=limits)
    numbers = np.random.default_rng(seed)
    tokens: list[int] = []
    while len(tokens) < MOST_TOKENS and not matcher.is_stopped():
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[:VOCABULARY]
        assert bits.any(), matcher.get_error()
        if bits[END_TOKEN]:
            assert matcher.is_accepting()
        logits = np.where(bits, numbers.normal(0, 4, VOCABULARY), -np.inf)
        token = int(logits.argmax())
        if token == END_TOKEN:
            break
        assert matcher.consume_token(token)
        tokens.append(token)
    else:
        if not matcher.is_stopped():
            return None
    assert not matcher.is_error() or matcher.is_accepting()
    return tiny_text(tokens).decode()


def judge(seeds: range) -> tuple[int, int]:
    """Draws from a random schema for each seed -> answers that were judged, schemas without any answer."""
    judged = impossible = 0
    for seed in seeds:
        schema = random_schema(random.Random(seed))
        grammar = json_schema_grammar(schema)
        try:
            check_grammar(grammar)
        except Unfit:
            impossible += 1
            continue
        answer = drawn(grammar, seed)
        if answer is not None:
            judged += 1
            try:
                jsonschema.validate(json.loads(answer), schema, format_checker=jsonschema.FormatChecker())
            except (ValueError, jsonschema.ValidationError) as error:
                raise AssertionError(f"seed {seed}: {answer!r} does not fit {json.dumps(schema)}") from error
    return judged, impossible


def test_answers_by_random_logits_fit_their_schema() -> None:
    judged, impossible = judge(range(300))
    assert judged > 250 and impossible < 30


@pytest.mark.slow
def test_ten_thousand_answers_fit_their_schema() -> None:
    judged, impossible = judge(range(1000, 11_000))
    assert judged > 8_500 and impossible < 1000
