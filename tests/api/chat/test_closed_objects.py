"""Objects that list their properties have no others in an answer, where that cannot make a schema contradict itself."""

from __future__ import annotations

import json
from typing import Any

import pytest

from service.api.structured.grammar import json_schema_grammar
from service.api.structured.schema_form import schema_form
from tests.api.chat.test_grammar import accepts

POINT: dict[str, Any] = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
LISTED, MORE = {"x": 1}, {"x": 1, "y": 2}


def takes(schema: dict[str, Any], value: Any) -> bool:
    return accepts(json_schema_grammar(schema), json.dumps(value))


@pytest.mark.parametrize(
    ("schema", "listed", "more"),
    [
        (POINT, LISTED, MORE),
        ({"type": "array", "items": POINT}, [LISTED], [MORE]),
        ({"$defs": {"Point": POINT}, "$ref": "#/$defs/Point"}, LISTED, MORE),
        ({"anyOf": [POINT, {"type": "null"}]}, LISTED, MORE),
        ({"type": "object", "properties": {"at": POINT}}, {"at": LISTED}, {"at": MORE}),
        ({"type": ["object", "null"], "properties": POINT["properties"]}, LISTED, MORE),
        ({"type": "object", "properties": {"allOf": POINT}}, {"allOf": LISTED}, {"allOf": MORE}),
    ],
)
def test_objects_at_every_place_are_closed(schema: dict[str, Any], listed: Any, more: Any) -> None:
    assert takes(schema, listed) and not takes(schema, more)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {"type": "object", "properties": {}},
        {**POINT, "additionalProperties": True},
        {**POINT, "additionalProperties": {"type": "integer"}},
        {**POINT, "minProperties": 2},
        {**POINT, "required": ["x", "y"]},
        {**POINT, "enum": [MORE]},
        {"allOf": [POINT, {"type": "object", "properties": {"y": {"type": "integer"}}}]},
        {"properties": {"x": {"type": "integer"}}, "anyOf": [{"required": ["y"]}, {"properties": {"y": {}}}]},
        {"$defs": {"Y": {"properties": {"y": {}}}}, "properties": {"x": {}}, "$ref": "#/$defs/Y"},
    ],
)
def test_objects_that_may_need_more_names_stay_open(schema: dict[str, Any]) -> None:
    assert takes(schema, MORE)


def test_a_schema_that_is_given_is_not_changed() -> None:
    schema = {"type": "array", "items": POINT, "examples": [{"properties": {"x": 1}}]}
    before = json.dumps(schema)
    form, _ = schema_form(schema)
    assert form["items"]["additionalProperties"] is False
    assert json.dumps(schema) == before
