"""The process that tries grammars: `service.api.structured.grammar_worker <socket fd> <memory bytes> <cpu seconds>`.

It does on a smaller scale what the engine will do with a grammar: build the matcher, compute the first mask and follow
a few tokens of two answers, over the single bytes and some longer tokens, so that no model has to be loaded. A grammar
that overflows the stack ends this process and never reaches another one.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from functools import cache
from typing import Any
from urllib.parse import quote

import llguidance
import msgspec
import numpy as np

from service.api.structured.schema_form import Path, children, without
from service.confined.channel import Struct, WorkerChannel, allow_cpu, confine
from service.link.messages import PARSER_LIMITS

CHECK_LIMITS: dict[str, Any] = {
    name: value // 2 if type(value) is int else value for name, value in PARSER_LIMITS.items()
}
"""Half of the engine's budgets for the same work."""
CHECK_STACK_BYTES = 6 << 20
"""Stack of a thread that checks a grammar: what does not overflow it is far from overflowing a thread of the engine."""
_STEPS = 16
"""Tokens of each answer that is followed."""
_REASONS = {
    "fuel": "too complex: building it costs more than allowed",
    "schema too large": "too complex: building it costs more than allowed",
    "panic": "the library that compiles it fails on it",
}
"""By a sign of it in the library's message."""
_FAULTS = {
    "pattern": "no regular expression that a grammar can follow",
    "patternProperties": "names that no grammar can follow, or that fit several of its patterns",
    "oneOf": "its schemas must exclude each other, which cannot be seen of these; anyOf allows both",
    "$ref": "it names no part of the schema",
}
"""By keyword."""
_MAX_REASON = 200
_BYTES = (1 << 256) - 1
"""The tokens of single bytes in a mask."""


class TryGrammar(Struct, frozen=True):
    """Answered by Tried."""

    grammar: str


class Tried(Struct, frozen=True):
    """problem: why the grammar cannot be used; empty if it can. cpu_seconds: processor time that trying it took. path:
    of the keyword of its schema that is the reason; empty if that is not known."""

    problem: str
    cpu_seconds: float = 0.0
    path: Path = ()


def problem(grammar: str) -> tuple[str, Path]:
    """(why a grammar cannot be used, empty if it can; the path of the keyword of its schema that is the reason, if it
    is known). A hostile grammar may overflow the stack of the calling thread."""
    matcher = _matcher(grammar)
    if not matcher.is_error():
        matcher.compute_bitmask()
        if matcher.is_error():
            if matcher.get_error().startswith("NoExtension"):
                return "no answer can match it", ()
            return "too complex: its first token costs more than allowed", ()
        _follow(matcher)
        return "", ()
    error = " ".join(matcher.get_error().split())
    for sign, reason in _REASONS.items():
        if sign in error:
            return reason, ()
    schema = msgspec.json.decode(grammar)["grammars"][0].get("json_schema")
    if schema is None:
        return error[:_MAX_REASON].rstrip(".") or "it cannot be compiled", ()
    path = _fault(schema)
    keyword = path[-1] if path else ""
    return _FAULTS.get(str(keyword), "nothing fits it together with the rest, or no grammar can say it"), path


def _matcher(grammar: str) -> llguidance.LLMatcher:
    return llguidance.LLMatcher(_tokenizer(), grammar, log_level=0, limits=llguidance.LLParserLimits(**CHECK_LIMITS))


def _fault(schema: dict[str, Any]) -> Path:
    """The path of the keyword without which the innermost part that cannot be compiled could be."""
    path: Path = ()
    part = schema
    while inner := next(((step, child) for step, child in children(part) if _fails(schema, (*path, *step))), None):
        path, part = (*path, *inner[0]), inner[1]
    keys = [key for key in part if key not in ("x-guidance", "$defs", "definitions", "$schema", "$id")]
    keys.sort(key=lambda key: {"type": 1, "properties": 2, "enum": 2, "const": 2}.get(key, 0))
    return next(((*path, key) for key in keys if not _fails(without(schema, (*path, key)), path)), path)


def _fails(schema: dict[str, Any], path: Path) -> bool:
    """Whether a part of a schema cannot be compiled on its own."""
    # References of the schema are to lead to the same parts below a definition.
    root = json.dumps({key: value for key, value in schema.items() if key != "$schema"})
    pointer = "".join("/" + str(step).replace("~", "~0").replace("/", "~1") for step in path)
    about: dict[str, Any] = {key: schema[key] for key in ("$schema", "x-guidance") if key in schema}
    inner = json.loads(root.replace('"$ref": "#', '"$ref": "#/$defs/root'))
    whole = {**about, "$ref": f"#/$defs/root{quote(pointer)}", "$defs": {"root": inner}}
    return _matcher(json.dumps({"grammars": [{"json_schema": whole}]})).is_error()


def _follow(matcher: llguidance.LLMatcher) -> None:
    """Follow two answers, of the lowest and of the highest allowed bytes. They may end, or exceed their budget: in the
    engine that ends one answer with an error."""
    matchers = (matcher, matcher.deep_copy())
    masks = np.zeros((2, -(-(_Vocabulary.eos_token_id + 1) // 32)), np.int32)
    for _ in range(_STEPS):
        for follower, mask in zip(matchers, masks, strict=True):
            follower.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        lowest, highest = (int.from_bytes(mask.tobytes(), "little") & _BYTES for mask in masks)
        if lowest:
            matchers[0].consume_token((lowest & -lowest).bit_length() - 1)
        if highest:
            matchers[1].consume_token(highest.bit_length() - 1)
        if not lowest and not highest:
            return


def _longer_tokens() -> Iterator[bytes]:
    """White space of indented text, and letters and digits: without some tokens, the preparations for JSON would be
    empty."""
    yield from (b" " * length for length in range(2, 65))
    for run in (b"abcdefgh", b"abababab", b"aaaaaaaa", b"00000000"):
        yield from (run[:length] for length in (2, 4, 8))


class _Vocabulary:
    """The vocabulary as llguidance.TokenizerWrapper takes it. The bytes come first."""

    bos_token_id = None
    tokens = (*(bytes([value]) for value in range(256)), *dict.fromkeys(_longer_tokens()), b"<end>")
    eos_token_id = len(tokens) - 1
    special_token_ids = (eos_token_id,)

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


@cache
def _tokenizer() -> llguidance.LLTokenizer:
    ends = _Vocabulary.eos_token_id
    wrapper, slices = llguidance.TokenizerWrapper(_Vocabulary()), llguidance.LLTokenizer.json_slices()
    return llguidance.LLTokenizer(wrapper, n_vocab=ends + 1, eos_token=ends, slices=slices)


def main(fd: int, memory_bytes: int, cpu_seconds: int) -> None:
    confine(memory_bytes)
    channel = WorkerChannel(socket.socket(fileno=fd), TryGrammar)
    threading.stack_size(CHECK_STACK_BYTES)
    thread = threading.Thread(target=_serve, args=(channel, cpu_seconds))
    thread.start()
    thread.join()


def _serve(channel: WorkerChannel, cpu_seconds: int) -> None:
    problem('{"grammars": [{"lark_grammar": "start: /a/"}]}')  # otherwise the first grammar would have to wait for this
    while True:
        try:
            asked = channel.receive()
        except EOFError:
            return
        allow_cpu(cpu_seconds)
        begun = time.process_time()
        found, path = problem(asked.grammar)
        channel.send(Tried(found, time.process_time() - begun, path))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
