"""Schemas as generators write them are taken, and what no grammar can say of them is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from service.api.structured.grammar import form_grammar, json_schema_grammar
from service.api.structured.grammar_worker import problem
from service.api.structured.schema_form import Unfit, schema_form, shown, without
from tests.api.chat.test_grammar import accepts
from tests.support.grammars import check_grammar

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
