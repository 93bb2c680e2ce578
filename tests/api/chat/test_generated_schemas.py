"""Schemas as generators write them are taken, and what no grammar can say of them is named."""

from __future__ import annotations

import datetime
import enum
import json
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field, HttpUrl, IPvAnyAddress, conint

from service.api.structured.grammar import form_grammar, json_schema_grammar
from service.api.structured.grammar_worker import problem
from service.api.structured.schema_form import schema_form, without
from service.api.structured.schema_values import Unfit, shown
from tests.api.chat.test_grammar import accepts
from tests.support.grammars import check_grammar
from tests.support.zod import FORMATS as ZOD

ROWS = [json.loads(line) for line in Path(__file__).with_name("generated_schemas.jsonl").read_text().splitlines()]
"""(who writes it, schema, values that fit, values that do not, paths of what is not enforced without strict)"""
NEVER_REFUSED = ("uniqueItems", "format")


def loosened(schema: dict[str, Any]) -> tuple[str, list[str]]:
    """As for a tool without strict."""
    form, unenforced = schema_form(schema, loose=True)
    while path := problem(form_grammar(form))[1]:
        form = without(form, path)
        unenforced.append(shown(path))
    grammar = form_grammar(form)
    check_grammar(grammar)
    return grammar, unenforced


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_what_generators_write(row: list[Any]) -> None:
    _, schema, fits, breaks, unenforced = row
    grammar, left_out = loosened(schema)
    assert left_out == unenforced
    assert [value for value in fits if not accepts(grammar, json.dumps(value))] == []
    assert [value for value in breaks if accepts(grammar, json.dumps(value))] == []
    refused = [path for path in unenforced if not path.endswith(NEVER_REFUSED)]
    if not refused:
        check_grammar(json_schema_grammar(schema))
        return
    with pytest.raises(Unfit) as caught:
        check_grammar(json_schema_grammar(schema))
    assert str(caught.value).partition(": ")[0] in refused


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


class Cat(BaseModel):
    kind: Literal["cat"] = "cat"
    lives: conint(ge=0, le=9)  # type: ignore[valid-type]


class Dog(BaseModel):
    kind: Literal["dog"] = "dog"
    friends: list[Cat | Dog] = []


class Order(BaseModel):
    id: uuid.UUID
    token: Annotated[uuid.UUID, Field(json_schema_extra={"format": "uuid4"})]
    price: Decimal
    total: Annotated[Decimal, Field(max_digits=5, decimal_places=2)] | None
    colors: set[Color]
    counts: dict[Color, int]
    pair: tuple[int, str]
    pet: Annotated[Cat | Dog, Field(discriminator="kind")]
    when: datetime.datetime
    span: datetime.timedelta
    address: IPvAnyAddress
    url: HttpUrl
    data: bytes = b""
    extra: Any = None


def test_a_model_of_pydantic() -> None:
    order = {
        "id": "123e4567-e89b-12d3-a456-426614174000",
        "token": "123e4567-e89b-42d3-a456-426614174000",
        "price": 1.25,
        "total": None,
        "colors": ["red"],
        "counts": {"red": 1},
        "pair": [1, "a"],
        "pet": {"kind": "dog", "friends": [{"kind": "cat", "lives": 9}]},
        "when": "2026-01-31T10:00:00Z",
        "span": "P1DT2H",
        "address": "10.0.0.1",
        "url": "https://example.org/a",
    }
    assert Order.model_validate(order)
    schema = Order.model_json_schema()
    unenforced: list[str] = []
    grammar = json_schema_grammar(schema, unenforced)
    check_grammar(grammar)
    assert unenforced == ["properties.colors.uniqueItems", "properties.address.format"]
    assert accepts(grammar, json.dumps(order))
    for name, wrong in {
        "token": order["id"],
        "price": [1],
        "counts": {"green": 1},
        "pair": [1],
        "pet": {"lives": 3},
        "when": "2026-01-31T10:00:00.12345678901234567Z",
        "url": "not a url",
    }.items():
        assert not accepts(grammar, json.dumps({**order, name: wrong})), name


@pytest.mark.parametrize("name", ZOD)
def test_strings_of_zod(name: str) -> None:
    part, right, wrong = ZOD[name]
    grammar = json_schema_grammar({"type": "object", "properties": {"a": part}, "required": ["a"]})
    check_grammar(grammar)
    assert [text for text in right if not accepts(grammar, json.dumps({"a": text}, ensure_ascii=False))] == []
    assert [text for text in wrong if accepts(grammar, json.dumps({"a": text}, ensure_ascii=False))] == []


def test_a_class_keeps_its_signs_out_of_a_string() -> None:
    """The library lets the escapes of these through a class that excludes them but no control character."""
    grammar = json_schema_grammar({"type": "string", "pattern": r'^[^"\\]*$'})
    assert [accepts(grammar, json.dumps(text)) for text in ("ab", 'a"b', "a\\b")] == [True, False, False]
