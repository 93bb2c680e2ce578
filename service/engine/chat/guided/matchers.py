"""A model's vocabulary in the form that llguidance reads, and matchers of grammars over it. Torch-free."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache

import llguidance

from models.interfaces.processor import ChatProcessor
from service.link.messages import PARSER_LIMITS

log = logging.getLogger(__name__)

_LONGEST_REASON = 200
_FORCED_TEXTS = 16_384
"""Forced texts whose tokens are remembered, the least recently used go first."""

_SHORT_STRING = r'[^"\\\x00-\x1F\x7F]{1,5}'
"""Pattern of tokens that also fit near the end of a string of limited length, where all others have to be tried one by
one."""


def build_matcher(tokenizer: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    """ValueError if it cannot be built."""
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=llguidance.LLParserLimits(**PARSER_LIMITS))
    if matcher.is_error():
        log.warning("a grammar cannot be built: %s", " ".join(matcher.get_error().split())[:_LONGEST_REASON])
        raise ValueError("the grammar cannot be built")
    matcher.compute_bitmask()  # Copies share the results of the first mask, which is the slowest one.
    return matcher


class _Vocabulary:
    """Tokens as llguidance.TokenizerWrapper wants them. What ends an answer, and what has no text, is special: no
    grammar of text leads to it."""

    bos_token_id = None

    def __init__(self, processor: ChatProcessor, vocab_limit: int) -> None:
        texts = [processor.detokenize([token]) for token in range(vocab_limit)]
        ends = {token for token in processor.stop_token_ids if token < vocab_limit}
        self.special_token_ids = sorted(ends | {token for token, text in enumerate(texts) if not text})
        for token in self.special_token_ids:
            texts[token] = b"<|%d|>" % token
        self.tokens = texts
        self.eos_token_id = min(ends)
        self._tokenize = processor.tokenize
        self._forced = lru_cache(_FORCED_TEXTS)(self._tokens_of)
        special = set(self.special_token_ids)
        self._ids = {text: token for token, text in enumerate(texts) if token not in special}
        self._longest = max(map(len, self._ids))

    def __call__(self, text: str) -> list[int]:
        """Tokens of a text that a grammar forces, as the model would write them. The library's threads call this while
        they compute masks, under the interpreter lock, and mostly for the same texts: names of a schema and their
        ends."""
        return self._forced(text)

    def _tokens_of(self, text: str) -> list[int]:
        """A tokenizer that begins every text with a blank would add one here. In that case the longest tokens that
        spell the text itself are taken."""
        ids = self._tokenize(text)
        raw = text.encode()
        return ids if b"".join(self.tokens[token] for token in ids) == raw else spelled(raw, self._ids, self._longest)


def spelled(raw: bytes, tokens: Mapping[bytes, int], longest: int) -> list[int]:
    """Spells `raw` with the longest tokens one after the other, up to where none fits. tokens: ids by their bytes.
    longest: bytes of the longest token."""
    ids: list[int] = []
    start = 0
    while start < len(raw):
        ends = range(min(len(raw), start + longest), start, -1)
        end = next((end for end in ends if raw[start:end] in tokens), None)
        if end is None:
            break
        ids.append(tokens[raw[start:end]])
        start = end
    return ids


def build_tokenizer(processor: ChatProcessor, vocab_limit: int) -> llguidance.LLTokenizer:
    """The model's tokens as bytes, for all families: a grammar depends only on the text of tokens."""
    ends = sorted(token for token in processor.stop_token_ids if token < vocab_limit)
    blanks, *strings = llguidance.LLTokenizer.json_slices()
    slices = [blanks, _SHORT_STRING, *strings]  # A token belongs to the first one that holds it.
    wrapper = llguidance.TokenizerWrapper(_Vocabulary(processor, vocab_limit))
    return llguidance.LLTokenizer(wrapper, n_vocab=vocab_limit, eos_token=ends, slices=slices)
