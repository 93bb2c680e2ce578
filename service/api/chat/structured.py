"""Fields that constrain an answer -> a checked grammar: OpenAI's response_format, and vLLM's name for the same,
structured_outputs.
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


async def answer_grammar(checks: GrammarChecks, body: ChatRequestBody, client: str) -> str:
    """The grammar that the request's fields describe, "" for free text. ApiError 400 names the field."""
    formats = [] if body.response_format is None else _of_format(body.response_format)
    asked = [*formats, *_of_outputs(body.structured_outputs or StructuredOutputs())]
    if not asked:
        return ""
    field, make = asked[0]
    if len(asked) > 1:
        raise invalid(asked[1][0], f"{field} says already what the answer has to match")
    return await checks.checked(make, field, client)


def _of_outputs(given: StructuredOutputs) -> Iterator[tuple[str, Callable[[], str]]]:
    """(field, function that makes its grammar) for each field that is set."""
    makers: dict[str, Callable[[Any], str]] = {
        "json": _schema,
        "regex": regex_grammar,
        "choice": choice_grammar,
        "grammar": lark_grammar,
        "json_object": lambda _: _any_object(),
    }
    for name, make in makers.items():
        value = getattr(given, name)
        if value is not None and value is not False:
            yield f"structured_outputs.{name}", partial(make, value)


def _of_format(given: ResponseFormat) -> Iterator[tuple[str, Callable[[], str]]]:
    """ApiError 400 for a schema that the type has no place for: the answer would not fit it."""
    if given.schema is not None:
        message = "not supported; use type json_schema, with the schema as json_schema.schema"
        raise invalid("response_format.schema", message, "unsupported_parameter")
    if given.type == "json_schema":
        if given.json_schema is None:
            raise invalid("response_format.json_schema", "required with this type")
        yield "response_format.json_schema.schema", partial(json_schema_grammar, given.json_schema.schema)
    elif given.json_schema is not None:
        raise invalid("response_format.json_schema", f"only with type json_schema; the type is {given.type}")
    elif given.type == "json_object":
        yield "response_format", _any_object


def _schema(value: dict[str, Any] | str) -> str:
    """value: a schema, or its text."""
    if isinstance(value, str):
        check_values(value)
        value = msgspec.json.decode(value, type=dict[str, Any])
    return json_schema_grammar(value)


def _any_object() -> str:
    return json_schema_grammar({"type": "object"})
