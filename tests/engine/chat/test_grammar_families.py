"""Grammars over the real tokenizers of every family: byte level, byte fallback, Kimi's ranks."""

from __future__ import annotations

import json
import random
from pathlib import Path

import jsonschema
import llguidance
import numpy as np
import pytest

from models.checkpoints.registry import family_of, resolve
from models.interfaces.processor import ChatProcessor
from service.api.structured.grammar import json_schema_grammar
from service.engine.chat.guided import matchers
from service.engine.chat.guided.matchers import build_tokenizer
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


BYTE_LEVEL = [path for path in FAMILIES if path.name not in ("kimi_vl", "minicpmv_4_0")]
TEXTS = ('"quantity": ', '{"a b": [1, 2', "  x\n\t", "naïve 日本 🙂", "<|im_end|>", "<think>", "5 kg/m", "")


@pytest.mark.parametrize("directory", FAMILIES, ids=lambda path: path.parent.name + "-" + path.name)
def test_the_library_reads_a_byte_level_tokenizer_by_itself(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And has the same tokens, of which no text leads to a special one."""
    processor: ChatProcessor = resolve(family_of(directory).processor)(directory)
    asked = list[str]()

    def ask(self: matchers._Vocabulary, text: str) -> list[int]:
        asked.append(text)
        return processor.tokenize(text)

    monkeypatch.setattr(matchers._Vocabulary, "__call__", ask)
    tokenizer = build_tokenizer(processor, processor.vocab_size)
    asked.clear()  # The wrapper tries whether bytes are taken.
    for text in TEXTS:
        tokens = tokenizer.tokenize_str(text)
        assert not any(map(tokenizer.is_special_token, tokens))
        if directory in BYTE_LEVEL:
            assert tokens == processor.tokenize(text) and processor.detokenize(tokens) == text.encode()
    assert bool(asked) == (directory not in BYTE_LEVEL)


def test_a_tokenizer_that_the_library_reads_differently_is_not_left_to_it(caplog: pytest.LogCaptureFixture) -> None:
    processor: ChatProcessor = resolve(family_of(EMBEDDED).processor)(EMBEDDED)
    published = json.loads(processor.tokenizer_json([]) or "")
    one, other = list(published["model"]["vocab"])[300:302]
    ids = published["model"]["vocab"]
    ids[one], ids[other] = ids[other], ids[one]
    processor.tokenizer_json = lambda special_ids: json.dumps(published)  # type: ignore[method-assign]
    tokenizer = build_tokenizer(processor, processor.vocab_size)
    assert tokenizer.decode_bytes([300]) == processor.detokenize([300])
    assert "reads the tokenizer differently" in caplog.text
