"""Fields that constrain an answer -> a checked grammar: OpenAI's response_format, and vLLM's names for the same,
structured_outputs and the older guided_*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import msgspec

from service.api.chat.schema import ChatRequestBody, ResponseFormat, StructuredOutputs
from service.api.http.errors import invalid
from service.api.http.json_body import check_values
from service.api.structured.grammar import (
    GrammarChecks,
    choice_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
)


async def answer_grammar(checks: GrammarChecks, body: ChatRequestBody, client: str) -> tuple[str, list[str]]:
    """(the grammar that the request's fields describe, "" for free text; paths of what it does not enforce). ApiError
    400 names the field."""
    unenforced: list[str] = []
    asked = list(_asked(body, unenforced))
    if not asked:
        return "", []
    field, make = asked[0]
    if len(asked) > 1:
        raise invalid(asked[1][0], f"{field} says already what the answer has to match")
    return await checks.checked(make, field, client), [f"{field}.{path}" for path in unenforced]


def _asked(body: ChatRequestBody, unenforced: list[str]) -> Iterator[tuple[str, Callable[[], str]]]:
    """(field, function that makes its grammar) for each field that is set. unenforced: see json_schema_grammar."""
    if body.response_format is not None:
        yield from _of_format(body.response_format, unenforced)
    outputs = body.structured_outputs or StructuredOutputs()
    schema = partial(_schema, unenforced=unenforced)
    values: list[tuple[str, Any, Callable[[Any], str]]] = [
        ("structured_outputs.json", outputs.json, schema),
        ("structured_outputs.regex", outputs.regex, regex_grammar),
        ("structured_outputs.choice", outputs.choice, choice_grammar),
        ("structured_outputs.grammar", outputs.grammar, lark_grammar),
        ("structured_outputs.json_object", outputs.json_object or None, lambda _: _any_object()),
        ("guided_json", body.guided_json, schema),
        ("guided_regex", body.guided_regex, regex_grammar),
        ("guided_choice", body.guided_choice, choice_grammar),
        ("guided_grammar", body.guided_grammar, lark_grammar),
    ]
    for field, value, make in values:
        if value is not None:
            yield field, partial(make, value)


def _of_format(given: ResponseFormat, unenforced: list[str]) -> Iterator[tuple[str, Callable[[], str]]]:
    """ApiError 400 for a schema that the type has no place for: the answer would not fit it."""
    if given.schema is not None:
        message = "not supported; use type json_schema, with the schema as json_schema.schema"
        raise invalid("response_format.schema", message, "unsupported_parameter")
    if given.type == "json_schema":
        if given.json_schema is None:
            raise invalid("response_format.json_schema", "required with this type")
        make = partial(json_schema_grammar, given.json_schema.schema, unenforced)
        yield "response_format.json_schema.schema", make
    elif given.json_schema is not None:
        raise invalid("response_format.json_schema", f"only with type json_schema; the type is {given.type}")
    elif given.type == "json_object":
        yield "response_format", _any_object


def _schema(value: dict[str, Any] | str, unenforced: list[str]) -> str:
    """value: a schema, or its text."""
    if isinstance(value, str):
        check_values(value)
        value = msgspec.json.decode(value, type=dict[str, Any])
    return json_schema_grammar(value, unenforced)


def _any_object() -> str:
    return json_schema_grammar({"type": "object"})
