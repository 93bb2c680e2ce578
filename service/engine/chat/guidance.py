"""Answers that match a grammar: their matchers, and the threads that build them and compute masks.

A matcher is built in a thread when its request comes, slow ones in a thread of their own; the request is admitted once
it is there. Another thread computes the masks of each step (service.engine.chat.masks). All of them spend their time in
llguidance, which releases the interpreter lock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import lru_cache
from typing import Protocol

import llguidance

from models import cpus
from models.processor import ChatProcessor
from service.engine.chat.masks import MaskJob, MaskTable, Unread, Wanted
from service.link.grammar_limits import LIMITS, deep_threads

log = logging.getLogger(__name__)

_MOST_KEPT = 64
"""Grammars whose matchers are kept to be copied, the least recently used go first."""
_MASK_THREADS = 8
_LONGEST_REASON = 200
_FORCED_TEXTS = 16_384
"""Forced texts whose tokens are remembered, the least recently used go first."""

_SHORT_STRING = r'[^"\\\x00-\x1F\x7F]{1,5}'
"""Tokens that also fit near the end of a string of limited length, where all the others have to be tried one by one."""


class Guide:
    """service.engine.chat.masks.RowGuide: the grammar of one sequence."""

    def __init__(self, matcher: Future[llguidance.LLMatcher]) -> None:
        self.built_later = matcher
        self._matcher: llguidance.LLMatcher | None = None
        self.begun = time.monotonic()
        """When its building was asked for."""
        self.num_consumed = 0
        """Tokens of the answer that the matcher has seen."""

    @property
    def built(self) -> bool:
        return self.built_later.done()

    @property
    def seconds(self) -> float:
        """Since then."""
        return time.monotonic() - self.begun

    def cancel(self) -> None:
        """It is no longer wanted: nobody waits for it where its building has not begun."""
        self.built_later.cancel()

    @property
    def matcher(self) -> llguidance.LLMatcher | None:
        """None where it could not be built."""
        if self._matcher is None and self.built_later.exception() is None:
            self._matcher = self.built_later.result()
        return self._matcher


class Guided(Protocol):
    """What a sequence shows of itself here."""

    guide: Guide | None
    generated: list[int]


class Guidance:
    """Builds the guides of one model."""

    def __init__(self, processor: ChatProcessor, vocab_limit: int) -> None:
        """vocab_limit: rows of the embedding past it only pad it and are never sampled."""
        self._builders = {slow: deep_threads(1, "slow-grammars" if slow else "grammars") for slow in (False, True)}
        """By whether what they build takes long: no usual grammar waits behind one that does."""
        self._masks = deep_threads(1, "masks")
        threads = min(_MASK_THREADS, cpus.available() // 2)
        self._executor = llguidance.LLExecutor(threads) if threads > 1 else None
        # Built while weights load: it takes a second for a published vocabulary, and part of it holds the lock.
        self._tokenizer = self._builders[False].submit(build_tokenizer, processor, vocab_limit)
        self._building: list[Guide] = []
        self._kept: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._keeping = threading.Lock()

    @property
    def building_since(self) -> float | None:
        """When the oldest of those was asked for that are being built; None without any."""
        return self._building[0].begun if self._building else None

    def begin(self, sequence: Guided, grammar: str, *, slow: bool = False) -> None:
        """Begins to build the sequence's guide. slow: that takes long, unless it is kept."""
        builder = self._builders[slow and grammar not in self._kept]
        sequence.guide = Guide(builder.submit(self._build, grammar))
        self._building.append(sequence.guide)

    def wait(self, seconds: float) -> None:
        """Until one is built, at most so long."""
        wait([guide.built_later for guide in self._building], seconds, FIRST_COMPLETED)

    def take_built(self) -> list[Guide]:
        """Those that have been built since the last call."""
        built = [guide for guide in self._building if guide.built]
        self._building = [guide for guide in self._building if guide not in built]
        return built

    def forget(self, guide: Guide) -> None:
        """Its sequence has ended."""
        if guide in self._building:
            self._building.remove(guide)
            guide.cancel()

    def _build(self, grammar: str) -> llguidance.LLMatcher:
        with self._keeping:
            kept = self._kept.get(grammar)
        if kept is None:
            kept = build_matcher(self._tokenizer.result(), grammar)
        with self._keeping:
            self._kept[grammar] = kept
            self._kept.move_to_end(grammar)
            if len(self._kept) > _MOST_KEPT:
                self._kept.popitem(last=False)
            return kept.deep_copy()

    def masks(self, sequences: Sequence[Guided], unread: Sequence[Unread], table: MaskTable) -> MaskJob:
        """Begins to compute the masks of a step. sequences: its rows; unread: tokens of each that were sampled and have
        not been read."""
        wanted = {
            # Tokens are copied: the engine's thread may read more of them.
            row: Wanted(guide, sequence.generated[guide.num_consumed :], places)
            for row, (sequence, places) in enumerate(zip(sequences, unread, strict=True))
            if (guide := sequence.guide) is not None
        }
        return MaskJob(wanted, len(sequences), table, self._masks, self._executor)


def build_matcher(tokenizer: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    """ValueError if it cannot be built."""
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=llguidance.LLParserLimits(**LIMITS))
    if matcher.is_error():
        log.warning("a grammar cannot be built: %s", " ".join(matcher.get_error().split())[:_LONGEST_REASON])
        raise ValueError("the grammar cannot be built")
    matcher.compute_bitmask()  # Copies share what the first mask, the slowest one, has worked out.
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

    def spelled_alike(self, tokenizer: llguidance.LLTokenizer) -> bool:
        """Whether another reader of the vocabulary has the same tokens. To the library 0xFF begins a special one."""
        ordinary = (token for token, text in enumerate(self.tokens) if not text.startswith(b"\xff"))
        special = set(self.special_token_ids)
        return all(
            tokenizer.is_special_token(token) == (token in special)
            and (token in special or tokenizer.decode_bytes([token]) == self.tokens[token])
            for token in ordinary
        )

    def __call__(self, text: str) -> list[int]:
        """Tokens of text that a grammar forces, as the model would write them. The library's threads ask for them in
        the midst of masks, under the interpreter lock, and mostly for the same: names of a schema, and what is left of
        them."""
        return self._forced(text)

    def _tokens_of(self, text: str) -> list[int]:
        """Tokenizers that begin every text with a blank would add one here: then the longest tokens are taken that
        spell the text itself."""
        ids = self._tokenize(text)
        raw = text.encode()
        return ids if b"".join(self.tokens[token] for token in ids) == raw else spelled(raw, self._ids, self._longest)


def spelled(raw: bytes, tokens: Mapping[bytes, int], longest: int) -> list[int]:
    """The longest of `tokens`, by their bytes, that spell `raw` one after the other, up to where none does. longest:
    bytes of the longest one."""
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
    """The model's tokens as bytes, for all families: what an answer's tokens are as text is all that a grammar sees.

    Where the library can read the tokenizer itself, its threads need not ask Python for tokens: in the midst of a step
    each of them would wait for the interpreter lock."""
    ends = sorted(token for token in processor.stop_token_ids if token < vocab_limit)
    blanks, *strings = llguidance.LLTokenizer.json_slices()
    slices = [blanks, _SHORT_STRING, *strings]  # A token belongs to the first one that holds it.
    vocabulary = _Vocabulary(processor, vocab_limit)
    published = processor.tokenizer_json(vocabulary.special_token_ids)
    if published is not None:
        read = llguidance.LLTokenizer(published, n_vocab=vocab_limit, eos_token=ends, slices=slices)
        if vocabulary.spelled_alike(read):
            return read
        log.warning("grammars ask for tokens under the interpreter lock: the library reads the tokenizer differently")
    wrapper = llguidance.TokenizerWrapper(vocabulary)
    return llguidance.LLTokenizer(wrapper, n_vocab=vocab_limit, eos_token=ends, slices=slices)
