"""The JSON Schema test suite, draft 2020-12: no grammar lets an answer through that the suite calls invalid."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from service.api.structured.grammar import json_schema_grammar
from service.api.structured.schema_form import Unfit
from tests.api.chat.test_grammar import accepts
from tests.support.grammars import check_grammar
from tests.support.rows import rows
from tests.support.schemas import UNSUPPORTED

DIRECTORY = Path(__file__).parent / "json_schema_suite"
UNSEEN = "nothing fits it together with the rest, or no grammar can say it"
ELSEWHERE = (
    "only references inside the schema are supported",
    "it names no part of the schema",
    "only the whole schema may have a name",
)
"""Reasons of any file: a reference that leads elsewhere, or a name."""
OTHER_REFUSALS = {
    "allOf": (UNSEEN,),
    "anyOf": (UNSEEN,),
    "multipleOf": ("units of its last digit",),
    "oneOf": ("its schemas must exclude each other", UNSEEN),
    "patternProperties": ("fit several of its patterns",),
}
"""By file: further reasons."""
NEVER_WRITTEN = {(file, case) for file, case, _ in rows(__file__, "never_written.jsonl")}
"""Valid, but no answer looks like this: the file says why."""
CALENDAR = re.compile(r"leap second|29 days in February|not a leap year")
"""Invalid cases that a pattern lets through: a day that its month does not have, a leap second at another time."""


@dataclass(frozen=True)
class Group:
    file: str
    description: str
    schema: Any
    cases: list[tuple[str, Any, bool]]

    @property
    def grammar(self) -> str:
        return json_schema_grammar(self.schema)


@cache
def groups(name: str) -> list[Group]:
    """Those with a schema that requests can have: an object."""
    lines = (DIRECTORY / f"{name}.jsonl").read_text("utf-8").splitlines()
    found = [Group(*json.loads(line)) for line in lines]
    return [group for group in found if isinstance(group.schema, dict)]


@cache
def refusals(name: str) -> dict[int, str]:
    """Reasons by the index of the group. What is not enforced counts as refused."""
    reasons = {}
    for index, group in enumerate(groups(name)):
        try:
            check_grammar(group.grammar)
            if '"uniqueItems": true' in json.dumps(group.schema):
                reasons[index] = "uniqueItems: not enforced"
        except Unfit as unfit:
            reasons[index] = str(unfit)
    return reasons


def accepted(name: str) -> list[Group]:
    return [group for index, group in enumerate(groups(name)) if index not in refusals(name)]


def written(data: Any) -> set[str]:
    """Ways to write a value."""
    separators = ((", ", ": "), (",", ":"))
    return {json.dumps(data, ensure_ascii=ascii, separators=two) for ascii in (True, False) for two in separators}


@pytest.mark.parametrize("name", ["draft2020-12", "formats"])
def test_what_the_suite_calls_valid_can_be_written_and_nothing_else(name: str) -> None:
    judged, through, missing = Counter[bool](), set(), set()
    for group in accepted(name):
        for case, data, valid in group.cases:
            judged[valid] += 1
            if any(accepts(group.grammar, text) for text in written(data)) != valid:
                (missing if valid else through).add((group.file, case))
    assert judged[False] > (90 if name == "formats" else 200)
    assert [case for case in through if name != "formats" or not CALENDAR.search(case[1])] == []
    files = {group.file for group in groups(name)}
    assert missing == {case for case in NEVER_WRITTEN if case[0] in files}


def test_what_is_refused_says_why() -> None:
    usual = ("no grammar can enforce it", "not enforced")
    for index, reason in refusals("draft2020-12").items():
        path, _, words = reason.partition(": ")
        if words in usual:
            assert re.split(r"[.\]]", path)[-1] in {*UNSUPPORTED, "uniqueItems"}, reason
        else:
            file = groups("draft2020-12")[index].file
            assert any(known in reason for known in (*ELSEWHERE, *OTHER_REFUSALS.get(file, ()))), (file, reason)
    assert not refusals("formats")
