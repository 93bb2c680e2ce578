"""Answers that masks allow fit their schema, as an independent validator says, whatever the vocabulary is."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest

from models.checkpoints.registry import family_of, resolve
from models.text.processor import ChatProcessor
from service.api.structured.grammar import json_schema_grammar
from service.api.structured.schema_form import Unfit
from service.engine.chat.guided.mask_server import build_tokenizer
from service.link.messages import PARSER_LIMITS
from tests.support.grammars import check_grammar
from tests.support.schemas import random_schema
from tests.support.slow import slow
from tests.support.tiny_chat import tiny_processor

GOLDEN = Path(__file__).parents[2] / "golden"
EMBEDDED = Path(__file__).parents[3] / "models/embedded/qwen2_vl"
DIRECTORIES = [EMBEDDED, *(GOLDEN / name for name in ("minicpmv_2_5", "minicpmv_4_0", "kimi_vl"))]
"""Byte level, byte fallback, Kimi's ranks."""
FAMILIES = pytest.mark.parametrize("directory", [EMBEDDED, *(slow(one, id=one.name) for one in DIRECTORIES[1:])])


def drawn(processor: Any, tokenizer: llguidance.LLTokenizer, grammar: str, seed: int) -> str | None:
    """An answer of random tokens that the masks allow; None where it does not end."""
    limits = llguidance.LLParserLimits(**PARSER_LIMITS)
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    numbers, size = np.random.default_rng(seed), processor.vocab_size
    tokens: list[int] = []
    while len(tokens) < 600 and not matcher.is_stopped():
        allowed = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[:size]
        assert allowed.any(), matcher.get_error()
        assert matcher.is_accepting() or not any(allowed[token] for token in processor.stop_token_ids if token < size)
        token = int(numbers.choice(np.flatnonzero(allowed)))
        if token in processor.stop_token_ids:
            break
        assert processor.detokenize([token]), f"token {token} has no text"
        assert matcher.consume_token(token)
        tokens.append(token)
    assert not matcher.is_error() or matcher.is_accepting()
    return processor.detokenize(tokens).decode() if matcher.is_accepting() else None


def judge(processor: Any, seeds: range, depth: int = 3) -> tuple[int, int]:
    """Draws from a random schema for each seed -> answers that fit, schemas without any answer."""
    tokenizer = build_tokenizer(processor, processor.vocab_size)
    judged = impossible = 0
    for seed in seeds:
        schema = random_schema(random.Random(seed), depth=depth)
        grammar = json_schema_grammar(schema)
        try:
            check_grammar(grammar)
        except Unfit:
            impossible += 1
            continue
        answer = drawn(processor, tokenizer, grammar, seed)
        if answer is not None:
            judged += 1
            try:
                jsonschema.validate(json.loads(answer), schema, format_checker=jsonschema.FormatChecker())
            except (ValueError, jsonschema.ValidationError) as error:
                raise AssertionError(f"seed {seed}: {answer!r} does not fit {json.dumps(schema)}") from error
    return judged, impossible


@pytest.mark.parametrize(
    ("seeds", "fit", "impossible"), [(range(100), 80, 10), slow(range(1000, 3000), 1700, 200)], ids=["few", "many"]
)
def test_answers_fit_their_schema(seeds: range, fit: int, impossible: int) -> None:
    judged, without_answer = judge(tiny_processor(), seeds)
    assert judged > fit and without_answer < impossible


@FAMILIES
def test_answers_fit_whatever_the_vocabulary_is(directory: Path) -> None:
    processor: ChatProcessor = resolve(family_of(directory).processor)(directory)
    assert judge(processor, range(40, 60), depth=2)[0] > 12


TEXTS = ('"quantity": ', '{"a b": [1, 2', "  x\n\t", "naïve 日本 🙂", "<|im_end|>", "<think>", "5 kg/m", "")


@FAMILIES
def test_texts_that_a_grammar_forces_have_ordinary_tokens(directory: Path) -> None:
    processor: ChatProcessor = resolve(family_of(directory).processor)(directory)
    tokenizer = build_tokenizer(processor, processor.vocab_size)
    for text in TEXTS:
        tokens = tokenizer.tokenize_str(text)
        assert not any(map(tokenizer.is_special_token, tokens))
        assert processor.detokenize(tokens) == text.encode()
