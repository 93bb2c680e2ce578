"""Answers that match a grammar: their matchers, and the masks of a step, computed beside the forward.

A matcher is built in a thread when its request comes, slow ones in a thread of their own; the request is admitted once
it is there. While the layers of a
step run, another thread advances the matchers of its guided rows by the tokens that the host has just read and computes
which tokens may follow. Both threads spend their time in llguidance, which releases the interpreter lock.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import lru_cache
from typing import Protocol

import llguidance
import numpy as np

from models import cpus
from models.processor import ChatProcessor
from service.link.grammar_limits import LIMITS, deep_threads

log = logging.getLogger(__name__)

_MOST_KEPT = 64
"""Grammars whose matchers are kept to be copied, the least recently used go first."""
_MASK_THREADS = 8
_LONGEST_REASON = 200
_NO_TOKEN = "no token can follow"
_FORCED_TEXTS = 16_384
"""Forced texts whose tokens are remembered, the least recently used go first."""

_SHORT_STRING = r'[^"\\\x00-\x1F\x7F]{1,5}'
"""Tokens that also fit near the end of a string of limited length, where all the others have to be tried one by one."""
_MANY_ROWS = 48
"""Tokens of fewer rows are consumed sooner by one thread than several threads are woken."""
_LATE = 0.004
"""Seconds after which nothing waits for masks any more that need not."""

GOES_ON, COMPLETE = "goes on", "complete"
"""Verdicts on a guided row after its newest token. Any other one says why no token can follow."""


class Guide:
    """The grammar of one sequence. While a MaskJob works on it, its matcher belongs to the thread of that job."""

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
        self._vocab_limit = vocab_limit
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
    def num_words(self) -> int:
        return -(-self._vocab_limit // 32)

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

    def masks(self, sequences: Mapping[int, Guided], num_rows: int) -> MaskJob:
        """Begins to compute the masks of a step of `num_rows` rows; sequences: the guided ones by row."""
        return MaskJob(sequences, np.zeros((num_rows, self.num_words), np.int32), self._masks, self._executor)


def build_matcher(tokenizer: llguidance.LLTokenizer, grammar: str) -> llguidance.LLMatcher:
    """ValueError if it cannot be built."""
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=llguidance.LLParserLimits(**LIMITS))
    if matcher.is_error():
        log.warning("a grammar cannot be built: %s", " ".join(matcher.get_error().split())[:_LONGEST_REASON])
        raise ValueError("the grammar cannot be built")
    matcher.compute_bitmask()  # Copies share what the first mask, the slowest one, has worked out.
    return matcher


class MaskJob:
    """forbidden int32 [rows, words], see service.engine.chat.sampler.mask_logits: 0 for rows without a guide and for
    those that do not go on. verdicts by row. Both once it is done."""

    def __init__(
        self,
        sequences: Mapping[int, Guided],
        forbidden: np.ndarray,
        threads: ThreadPoolExecutor,
        executor: llguidance.LLExecutor | None,
    ) -> None:
        # Tokens are copied: the engine's thread may read more of them.
        self._news: dict[int, tuple[Guide, list[int]]] = {}
        for row, sequence in sequences.items():
            assert sequence.guide is not None
            self._news[row] = sequence.guide, sequence.generated[sequence.guide.num_consumed :]
        self._executor = executor
        self.forbidden = forbidden
        self.verdicts: dict[int, str] = {}
        self.seconds = 0.0
        self._asked = time.perf_counter()
        self._done = threads.submit(self._compute)

    def done(self) -> bool:
        """A computation that raised is done, too: no row of it goes on."""
        if self._done.done() and (problem := self._done.exception()) is not None:
            log.error("masks cannot be computed", exc_info=problem)
            self.verdicts = dict.fromkeys(self._news, "its mask cannot be computed")
            self.forbidden[:] = 0
        return self._done.done()

    @property
    def late(self) -> bool:
        return time.perf_counter() - self._asked > _LATE

    def wait(self) -> None:
        """Until it is done, or late: then for as long as it takes."""
        wait((self._done,), None if self.late else _LATE)

    def _compute(self) -> None:
        started = time.perf_counter()
        matchers = self._built()
        self._consume(matchers)
        self.verdicts |= {row: _verdict(matcher) for row, matcher in matchers.items()}
        going = [(matcher, row) for row, matcher in matchers.items() if self.verdicts[row] == GOES_ON]
        if going:
            address, words = self.forbidden.ctypes.data, self.forbidden.shape[1]
            if self._executor is not None:
                self._executor.unsafe_compute_mask_ptr(going, address, 4 * words, len(self.forbidden))
            else:
                for matcher, row in going:
                    matcher.unsafe_compute_mask_ptr(address + 4 * words * row, 4 * words)
        some = np.bitwise_or.reduce(self.forbidden, axis=1)
        np.invert(self.forbidden, out=self.forbidden)
        for matcher, row in going:
            if matcher.is_error() or not some[row]:
                self.verdicts[row] = _verdict(matcher) if matcher.is_error() else _NO_TOKEN
        # A row without a mask bars nothing.
        for row in range(len(self.forbidden)):
            if self.verdicts.get(row) != GOES_ON:
                self.forbidden[row] = 0
        self.seconds = time.perf_counter() - started

    def _built(self) -> dict[int, llguidance.LLMatcher]:
        """Matchers by row; a verdict where there is none."""
        matchers = {}
        for row, (guide, _) in self._news.items():
            if (matcher := guide.matcher) is not None:
                matchers[row] = matcher
            else:
                self.verdicts[row] = "it cannot be built for this model's vocabulary"
        return matchers

    def _consume(self, matchers: Mapping[int, llguidance.LLMatcher]) -> None:
        """Advances the matchers by the tokens that they have not seen, one as a rule."""
        single = []
        for row, matcher in matchers.items():
            guide, tokens = self._news[row]
            guide.num_consumed += len(tokens)
            if len(tokens) == 1 and self._executor is not None and len(matchers) >= _MANY_ROWS:
                single.append((matcher, tokens[0]))
            else:
                matcher.consume_tokens(tokens)
        if self._executor is not None and single:
            self._executor.consume_token_par(single)


def _verdict(matcher: llguidance.LLMatcher) -> str:
    if matcher.is_error():
        error = " ".join(matcher.get_error().split())
        if error.startswith("NoExtension"):
            return _NO_TOKEN
        log.warning("a grammar cannot be followed: %s", error[:_LONGEST_REASON])
        return "it is too complex at this point"
    return COMPLETE if matcher.is_stopped() else GOES_ON


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
    """The model's tokens as bytes, for all families: what an answer's tokens are as text is all that a grammar sees."""
    ends = sorted(token for token in processor.stop_token_ids if token < vocab_limit)
    wrapper = llguidance.TokenizerWrapper(_Vocabulary(processor, vocab_limit))
    blanks, *strings = llguidance.LLTokenizer.json_slices()
    slices = [blanks, _SHORT_STRING, *strings]  # A token belongs to the first one that holds it.
    return llguidance.LLTokenizer(wrapper, n_vocab=vocab_limit, eos_token=ends, slices=slices)
