"""uniqueItems: exact where an array has few values, else refused."""

from __future__ import annotations

import itertools
import json
from typing import Any

import jsonschema
import pytest

from service.api.chat import schema_form
from service.api.chat.grammar import json_schema_grammar
from service.api.chat.schema_form import MAX_ALL_ORDERS, Unfit, target
from service.api.chat.unique_items import MAX_ORDERS, UNSUITABLE
from tests.api.chat.test_grammar import accepts
from tests.support.grammars import check_grammar

COLOURS = {"type": "array", "items": {"type": "string", "enum": ["red", "green", "blue"]}, "uniqueItems": True}
DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#"}


@pytest.mark.parametrize(
    "schema",
    [
        COLOURS,
        COLOURS | DRAFT_7,
        COLOURS | {"minItems": 2, "title": "Colours"},
        COLOURS | {"maxItems": 2},
        COLOURS | {"minItems": 1, "maxItems": 9},
        COLOURS | {"maxItems": 0},
        COLOURS | {"uniqueItems": False, "maxItems": 3},
        COLOURS | {"items": {"$ref": "#/$defs/colour"}, "$defs": {"colour": {"enum": ["red", "blue"], "title": "C"}}},
        {"type": "array", "items": {"enum": [1, True, "1", None, 1]}, "uniqueItems": True},
        {"type": "array", "items": {"type": "boolean"}, "uniqueItems": True},
        {"type": "array", "items": {"type": ["null", "boolean"]}, "uniqueItems": True, "minItems": 2},
        {"type": "array", "items": {"const": "red"}, "uniqueItems": True},
        {"type": "array", "items": {"type": "string", "enum": ["red", 1]}, "uniqueItems": True},
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": True, "maxItems": 1},
    ],
)
def test_exactly_the_arrays_without_repetition_fit(schema: dict[str, Any]) -> None:
    grammar = json_schema_grammar(schema)
    check_grammar(grammar)
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)(schema)
    values = ["red", "green", "blue", 1, True, None]
    arrays = [list(array) for length in range(4) for array in itertools.product(values, repeat=length)]
    arrays += [list(array) for array in itertools.combinations([*values, "red"], 4)]
    for array in arrays:
        assert accepts(grammar, json.dumps(array)) == validator.is_valid(array), array


@pytest.mark.parametrize(
    "schema",
    [
        {"uniqueItems": True},
        {"type": "array", "uniqueItems": True},
        {"type": ["array", "null"], "items": {"type": "boolean"}, "uniqueItems": True},
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        {"type": "array", "items": {"enum": [1.5, 1]}, "uniqueItems": True},
        {"type": "array", "items": {"enum": [[1], [2]]}, "uniqueItems": True},
        {"type": "array", "items": {"enum": list("abcdef")}, "uniqueItems": True},
        {"type": "array", "items": {"enum": list("abcdefghijkl")}, "maxItems": 2, "uniqueItems": True},
        {"type": "array", "items": {"enum": ["a"] * (MAX_ORDERS + 1)}, "uniqueItems": True},
        {"type": "array", "items": {"enum": ["a", "b"], "minLength": 1}, "uniqueItems": True},
        {"type": "array", "items": {"type": "boolean"}, "prefixItems": [{"const": True}], "uniqueItems": True},
        {"type": "array", "items": {"type": "boolean"}, "anyOf": [{"minItems": 1}], "uniqueItems": True},
        {"type": "array", "items": {"$ref": "#/items"}, "uniqueItems": True},
        {"type": "array", "items": {"$ref": "other#/$defs/a"}, "$defs": {"a": {"enum": [1]}}, "uniqueItems": True},
        {
            "$defs": {"a": {"enum": [1]}},
            "properties": {
                "b": {
                    "$id": "http://x/b",
                    "$defs": {"a": {"enum": [2]}},
                    "type": "array",
                    "items": {"$ref": "#/$defs/a"},
                    "uniqueItems": True,
                }
            },
        },
        COLOURS | {"maxItems": "2"},
        COLOURS | {"uniqueItems": "yes"},
    ],
)
def test_any_other_use_is_refused_with_the_reason(schema: dict[str, Any]) -> None:
    with pytest.raises(Unfit) as caught:
        json_schema_grammar(schema)
    assert str(caught.value) == UNSUITABLE


def test_the_orders_of_a_schema_are_bounded() -> None:
    five = {"type": "array", "items": {"enum": [1, 2, 3, 4, 5]}, "uniqueItems": True}
    most = MAX_ALL_ORDERS // MAX_ORDERS

    def arrays(count: int) -> str:
        return json_schema_grammar({"type": "object", "properties": {f"a{index}": five for index in range(count)}})

    check_grammar(arrays(most))
    with pytest.raises(Unfit, match="at most 480 possible orders of all such arrays together allowed"):
        arrays(most + 1)


def test_what_several_arrays_refer_to_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[str] = []

    def looking(schema: Any, reference: str) -> Any:
        looked_up.append(reference)
        return target(schema, reference)

    monkeypatch.setattr(schema_form, "target", looking)
    array = {"type": "array", "items": {"$ref": "#/$defs/a"}, "uniqueItems": True}
    json_schema_grammar({"$defs": {"a": {"const": 1}}, "anyOf": [array] * 100})
    assert looked_up == ["#/$defs/a"]


def test_no_array_is_long_enough() -> None:
    with pytest.raises(Unfit, match="Unsatisfiable"):
        check_grammar(json_schema_grammar(COLOURS | {"minItems": 4}))
