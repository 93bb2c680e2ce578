"""The grammar that an answer must match: text in llguidance's JSON form, of bounded size.

A confined process tries it (service/api/structured/grammar_worker.py), then the engine builds its matcher from it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import llguidance
import msgspec

from service.api.structured.schema_form import Unfit, as_grammar, schema_form
from service.link.sampling_limits import MAX_GRAMMAR_BYTES

MAX_SCHEMA_BYTES = 4 * MAX_GRAMMAR_BYTES
"""Bytes of a schema's JSON before it has the form of a grammar, which leaves a few keywords out. The tools of a request
may have as many together."""
_AROUND_CHOICE = len('"" | ')
"""Characters that a choice takes beside its own."""
_EMBEDDED = re.compile(r"%json\s*")


def json_schema_grammar(schema: Mapping[str, Any], unenforced: list[str] | None = None) -> str:
    """Grammar of answers that are JSON and valid against `schema`, which a check must accept. They have only names that
    it lists, unless it says that others are allowed. Unfit if it is too large or cannot be said in a grammar.

    unenforced: gets the paths of what is not enforced (schema_form).
    """
    check_size(len(msgspec.json.encode(schema)), MAX_SCHEMA_BYTES)
    form, left_out = schema_form(schema)
    if unenforced is not None:
        unenforced += left_out
    return form_grammar(form)


def form_grammar(form: Mapping[str, Any]) -> str:
    """Grammar of a schema that has its form already."""
    return _top_level({"json_schema": as_grammar(form)})


def regex_grammar(pattern: str) -> str:
    """Grammar of answers that match a regular expression as a whole, in the syntax of Rust's regex crate."""
    check_size(len(pattern))
    return llguidance.LLMatcher.grammar_from_regex(pattern)


def choice_grammar(choices: Sequence[str]) -> str:
    """Grammar of answers that are one of these strings."""
    check_size(sum(map(len, choices)) + _AROUND_CHOICE * len(choices))
    quoted = (json.dumps(choice, ensure_ascii=False) for choice in choices)
    return _top_level({"lark_grammar": f"start: CHOICE\nCHOICE: {' | '.join(quoted)}"})


def lark_grammar(text: str) -> str:
    """Grammar of answers that match a grammar in llguidance's dialect of Lark. Schemas in it get their form."""
    check_size(len(text))
    parts, at = [], 0
    for begin, end, schema in _embedded(text):
        formed = schema_form(schema)[0] if isinstance(schema, dict) else schema
        parts += [text[at:begin], json.dumps(formed, ensure_ascii=False)]
        at = end
    return formed_lark_grammar("".join([*parts, text[at:]]))


def formed_lark_grammar(text: str) -> str:
    """Grammar of a text in Lark whose schemas have their form already."""
    return _top_level({"lark_grammar": text})


def check_size(size: int, most: int = MAX_GRAMMAR_BYTES) -> None:
    """size: the bytes of a grammar, or what is known of them before the time is spent to make it."""
    if size > most:
        raise Unfit(f"too large: {size} bytes, at most {MAX_GRAMMAR_BYTES} allowed as a grammar")


def _top_level(grammar: dict[str, Any]) -> str:
    return msgspec.json.encode({"grammars": [grammar]}).decode()


def _embedded(text: str) -> Iterator[tuple[int, int, Any]]:
    """(begin, end, schema) of the schemas in a text in Lark."""
    for found in _EMBEDDED.finditer(text):
        try:
            schema, end = json.JSONDecoder().raw_decode(text, found.end())
        except (ValueError, RecursionError):
            raise Unfit("%json must be followed by a JSON schema") from None
        yield found.end(), end, schema
