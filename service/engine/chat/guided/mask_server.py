"""Builds the matchers of grammars and computes the masks of guided rows for one model. Torch-free.

With a GPU it is a process, `service.engine.chat.guided.mask_server SETTINGS`: a step lasts a millisecond or two, and in
the engine's own process every call of the library would wait for the interpreter lock while the engine computes. A
grammar that makes this process crash ends only guided answers. Several such processes share the rows of a step, since
the library's own threads took longer than one thread (benchmarks/lab-notes.md). On a CPU, where steps take longer, it
is a thread.

Requests and replies are msgpack messages over a connection; masks are in memory that both sides share.
"""

from __future__ import annotations

import logging
import mmap
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import llguidance
import msgspec
import numpy as np

from models.checkpoints.registry import family_of, resolve
from models.text.processor import ChatProcessor
from service.link.messages import PARSER_LIMITS
from service.system.children import give_back_freed_memory
from service.system.logs import configure_logging

log = logging.getLogger(__name__)

COMPLETE = "complete"
"""The verdict on a row whose newest token completes its answer. Any other verdict says why no token can follow."""
BROKEN = "its mask cannot be computed"

_MAX_KEPT = 64
"""Grammars whose matchers are kept to be copied, the least recently used go first."""
_LONGEST_REASON = 200
_NO_TOKEN = "no token can follow"
_MAX_DIGITS = 20
"""Digits that a number in JSON has at most in a row. The library's numbers have no end, and some models go on with
zeros for ever."""
_DIGITS = b"0123456789"
_STACK_BYTES = 64 << 20
"""Stack of a thread that builds grammars or computes masks: the library descends into references by recursion."""


# A model's vocabulary in the form that llguidance reads, and matchers of grammars over it.

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


def deep_executor(name: str) -> ThreadPoolExecutor:
    """One thread with a large stack. It is started at once, since the size is set when a thread starts."""
    executor = ThreadPoolExecutor(1, thread_name_prefix=name)
    with _deep_stacks():
        executor.submit(int)
    return executor


def deep_thread(target: Callable[[], None], name: str) -> threading.Thread:
    """A started thread with a large stack. The interpreter does not wait for its end."""
    thread = threading.Thread(target=target, name=name, daemon=True)
    with _deep_stacks():
        thread.start()
    return thread


@contextmanager
def _deep_stacks() -> Iterator[None]:
    """Sets the stack size of threads that start inside the context."""
    usual = threading.stack_size(_STACK_BYTES)
    try:
        yield
    finally:
        threading.stack_size(usual)


class ServerSettings(msgspec.Struct, frozen=True):
    """Argument of the process. link, memory: descriptors of the connection and of the masks int32 [rows, words]."""

    directory: str
    vocab_limit: int
    link: int
    memory: int
    rows: int
    words: int
    log_level: str
    log_format: Literal["text", "json"]


class Build(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Requests a matcher for a guide; answered by Built. slow: building it takes long, unless a matcher of the grammar
    is kept."""

    guide: int
    grammar: str
    slow: bool


class Forget(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The guide's answer has ended. This message is not answered, and its matcher need not be built any more."""

    guide: int


class Compute(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Masks of a step; answered by Computed. rows: of each guide that was built the tokens of its answer that its
    matcher has not seen. Their masks lie in memory one after the other, from `first` on."""

    first: int
    rows: list[tuple[int, list[int]]]


class Ready(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Sent once, when the vocabulary has been read, which takes seconds for a published one, or could not be read. In
    that case no guide can be built, and each Built says so."""


class Built(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The only answer to a Build. problem: why it was not built; empty if it was."""

    guide: int
    problem: str


class Computed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """verdicts: for the rows that end, by row of the request. seconds: from the request to the masks."""

    verdicts: dict[int, str]
    seconds: float


MaskRequest = Build | Forget | Compute
Reply = Ready | Built | Computed


class MaskServer:
    """Serves the other end of `link` until that is closed. masks: int32 [rows, words], bit i % 32 of word i // 32 for
    token i. tokenizer: makes the model's (build_tokenizer)."""

    def __init__(self, link: Connection, masks: np.ndarray, tokenizer: Callable[[], llguidance.LLTokenizer]) -> None:
        self._link = link
        self._masks = masks
        self._sending = threading.Lock()
        self._builders = {False: deep_executor("grammars"), True: deep_executor("slow-grammars")}
        """Builders for quick and for slow grammars, so that no usual grammar waits behind a slow one."""
        self._tokenizer = self._builders[False].submit(self._read, tokenizer)
        self._matchers: dict[int, Future[llguidance.LLMatcher]] = {}
        """Matchers by the number of their guide."""
        self._digits: dict[int, int] = {}
        """Digits at the end of the answer so far, by guide, for those in JSON."""
        self._kept: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._keeping = threading.Lock()

    def _read(self, tokenizer: Callable[[], llguidance.LLTokenizer]) -> llguidance.LLTokenizer:
        try:
            read = tokenizer()
            self._digit_tokens, self._quote_tokens = (_beginning(read, sign) for sign in ("[0-9]", '"'))
            return read
        except Exception:
            log.exception("the vocabulary cannot be read")
            raise
        finally:
            self._send(Ready())

    def run(self) -> None:
        """Handles requests until the link is closed. Call it in a thread with a deep stack (deep_thread)."""
        requests = msgspec.msgpack.Decoder(MaskRequest)
        try:
            while True:
                self._handle(requests.decode(self._link.recv_bytes()))
        except (EOFError, OSError):
            pass  # The engine has ended, or has no more use for this server.
        finally:
            for builder in self._builders.values():
                builder.shutdown(wait=False, cancel_futures=True)
            self._link.close()

    def _handle(self, request: MaskRequest) -> None:
        match request:
            case Build(guide, grammar, slow):
                builder = self._builders[slow and grammar not in self._kept]
                self._matchers[guide] = builder.submit(self._build, guide, grammar)
                if '"json_schema"' in grammar or "%json" in grammar:
                    self._digits[guide] = 0
            case Forget(guide):
                self._digits.pop(guide, None)
                if self._matchers.pop(guide).cancel():
                    self._send(Built(guide, "its answer has ended"))
            case Compute(first, rows):
                began = time.perf_counter()
                try:
                    verdicts = self._compute(first, rows)
                except Exception:
                    log.exception("masks cannot be computed")
                    verdicts = dict.fromkeys(range(len(rows)), BROKEN)
                self._send(Computed(verdicts, time.perf_counter() - began))

    def _build(self, guide: int, grammar: str) -> llguidance.LLMatcher:
        problem = "it cannot be built for this model's vocabulary"
        try:
            matcher = self._matcher_of(grammar)
            problem = ""
            return matcher
        except ValueError:
            raise  # build_matcher has logged it.
        except Exception:
            log.exception("a grammar cannot be built")
            raise
        finally:
            self._send(Built(guide, problem))

    def _matcher_of(self, grammar: str) -> llguidance.LLMatcher:
        with self._keeping:
            kept = self._kept.get(grammar)
        if kept is None:
            kept = build_matcher(self._tokenizer.result(), grammar)
        with self._keeping:
            self._kept[grammar] = kept
            self._kept.move_to_end(grammar)
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
            return kept.deep_copy()

    def _send(self, reply: Reply) -> None:
        try:
            with self._sending:
                self._link.send_bytes(msgspec.msgpack.encode(reply))
        except OSError:
            pass  # As in `run`.

    def _compute(self, first: int, rows: list[tuple[int, list[int]]]) -> dict[int, str]:
        """Advances the matchers of these guides and writes their masks. Returns the verdicts on the rows that end."""
        verdicts = {}
        masks = self._masks[first : first + len(rows)]
        address, size = masks.ctypes.data, masks.strides[0]
        for row, (guide, tokens) in enumerate(rows):
            matcher = self._matchers[guide].result()
            matcher.consume_tokens(tokens)
            matcher.unsafe_compute_mask_ptr(address + size * row, size)
            # A matcher without a token that can follow, which only its mask shows, is in error now.
            if (verdict := _verdict(matcher)) is not None:
                verdicts[row] = verdict
            if guide in self._digits and tokens and self._count_digits(guide, tokens) >= _MAX_DIGITS:
                self._end_number(masks[row])
        return verdicts

    def _count_digits(self, guide: int, tokens: list[int]) -> int:
        text = self._tokenizer.result().decode_bytes(tokens)
        run = len(text) - len(text.rstrip(_DIGITS))
        self._digits[guide] = run + (self._digits[guide] if run == len(text) else 0)
        return self._digits[guide]

    def _end_number(self, mask: np.ndarray) -> None:
        """Takes the digits from a mask, unless the answer is in a string, which could end here, or needs a digit."""
        others = mask & ~self._digit_tokens
        if others.any() and not (mask & self._quote_tokens).any():
            mask[:] = others


def _beginning(tokenizer: llguidance.LLTokenizer, sign: str) -> np.ndarray:
    """int32 [words], a mask of the tokens that begin with a sign, a regular expression."""
    grammar = llguidance.LLMatcher.grammar_from_regex(f"{sign}(?s:.*)")
    return np.frombuffer(llguidance.LLMatcher(tokenizer, grammar, log_level=0).compute_bitmask(), np.int32)


def _verdict(matcher: llguidance.LLMatcher) -> str | None:
    if matcher.is_error():
        error = " ".join(matcher.get_error().split())
        if error.startswith("NoExtension"):
            return _NO_TOKEN
        log.warning("a grammar cannot be followed: %s", error[:_LONGEST_REASON])
        return "it is too complex at this point"
    return COMPLETE if matcher.is_stopped() else None


def _tokenizer_of(settings: ServerSettings) -> llguidance.LLTokenizer:
    directory = Path(settings.directory)
    processor: ChatProcessor = resolve(family_of(directory).processor)(directory)
    tokenizer = build_tokenizer(processor, settings.vocab_limit)
    del processor
    give_back_freed_memory()  # More than half of what a published vocabulary takes while it is read.
    return tokenizer


def main(arguments: list[str]) -> None:
    settings = msgspec.json.decode(arguments[0], type=ServerSettings)
    configure_logging(settings.log_level, settings.log_format)
    memory = mmap.mmap(settings.memory, 4 * settings.rows * settings.words)
    masks: np.ndarray[Any, np.dtype[np.int32]] = np.frombuffer(memory, np.int32).reshape(settings.rows, settings.words)
    server = MaskServer(Connection(settings.link), masks, lambda: _tokenizer_of(settings))
    deep_thread(server.run, "masks").join()


if __name__ == "__main__":
    main(sys.argv[1:])
