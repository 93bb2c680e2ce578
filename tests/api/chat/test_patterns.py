"""Patterns with look-ahead mean the same after they were rewritten, and what rewriting takes is bounded."""

from __future__ import annotations

import itertools
import json
import random
import re
import string
from typing import Any

import pytest

from service.api.chat.grammar import json_schema_grammar
from service.api.chat.patterns import look_ahead
from service.api.chat.patterns.automaton import MAX_STEPS, Steps, automaton
from service.api.chat.patterns.characters import ANY, classes, expression, others, united
from service.api.chat.patterns.look_ahead import Separated, separated
from service.api.chat.patterns.syntax import parsed
from service.api.chat.schema_form import MAX_PATTERN_STEPS, Unfit
from tests.api.chat.test_grammar import accepts
from tests.support.grammars import check_grammar
from tests.support.zod import FORMATS as ZOD

SHORT = ["".join(letters) for length in range(6) for letters in itertools.product("ab-\n", repeat=length)]
"""All strings of up to five of these characters."""


def python(pattern: str) -> re.Pattern[str]:
    """A pattern as Python's re reads it: $ only at the end, and code points without braces."""
    coded = re.sub(r"\\x\{([0-9A-F]+)\}", lambda found: f"\\U{int(found[1], 16):08x}", pattern)
    return re.compile(re.sub(r"(?<!\\)\$", r"\\Z", coded), re.ASCII)


def same(pattern: str, made: Separated, texts: list[str]) -> bool:
    wanted, parts = python(pattern), [python(part) for part in made.patterns]
    assert not made.problem, (pattern, made.problem)
    assert not any(re.search(r"\(\?<?[=!]", part) for part in made.patterns)
    return all(bool(wanted.search(text)) == all(part.search(text) for part in parts) for text in texts)


@pytest.mark.parametrize(
    "pattern",
    [
        "^(?!a)",
        "^(?!.*--)[ab-]+$",
        "^(?=a)(?!ab)",
        "^(?=a|.*b$)(?!-|.b)[ab]*$",
        "a(?=b)",
        "(?!a).(?!b)",
        "^(?!(?!a)b)",
        "^(?=(?=a).b)..b",
        "^((?!--).)*$",
        "^(?:(?=a.)[ab]|(?!b)-){2,}$",
        "^(?!a)b|a$",
        "^(?=.{2,3}$)(a|b(?!b))*$",
        "^(?!$)",
        "(?=^a)a|b(?=$)",
        "(?:(?!a))*b",
        r"^(?!\n)[^a]{1,2}?$",
        r"^(?![\]a])(?=[^)|]*-)",
        "^(?<name>a)(?!b)",
        r"^(?!\x61|\u{62}|\u002d)",
        "^(?![a-b][-b-])",
    ],
)
def test_a_pattern_means_the_same_without_look_ahead(pattern: str) -> None:
    plain = pattern.replace("?<name>", "").replace(r"\u{62}", "b")
    for made in (separated(pattern), look_ahead.united(pattern)):
        assert same(plain, made, SHORT)
    assert len(look_ahead.united(pattern).patterns) == 1


def drawn(dice: random.Random, depth: int) -> str:
    leaves = ["a", "b", "-", ".", "[ab]", "[^a]", r"\w", r"\s"]
    kind = dice.choice(["leaf", "leaf", "sequence", "sequence", "choice", "repeat", "look", "look", "edge"])
    if not depth or kind == "leaf":
        return dice.choice(leaves)
    inner = [drawn(dice, depth - 1) for _ in range(dice.randrange(1, 4))]
    return {
        "sequence": "".join(inner),
        "choice": f"(?:{'|'.join(inner)})",
        "repeat": f"(?:{inner[0]}){dice.choice(['*', '+', '?', '{2}', '{1,2}', '*?'])}",
        "look": f"(?{dice.choice('=!')}{inner[0]})",
        "edge": dice.choice("^$"),
    }[kind]


@pytest.mark.parametrize("seed", range(4))
def test_random_patterns_mean_the_same(seed: int) -> None:
    dice, judged = random.Random(seed), 0
    for _ in range(500):
        looks = "".join(f"(?{dice.choice('=!')}{drawn(dice, 2)})" for _ in range(dice.randrange(3)))
        pattern = f"{'^' if looks else ''}{looks}{drawn(dice, 3)}"
        made = separated(pattern)
        if made.problem:
            assert made.problem == "nothing matches it" or "longer than" in made.problem, (pattern, made.problem)
        else:
            assert same(pattern, made, dice.sample(SHORT, 100)), pattern
            judged += 1
    assert judged > 300


@pytest.mark.parametrize("name", ZOD)
def test_what_zod_writes_is_accepted_and_kept(name: str) -> None:
    schema, right, wrong = ZOD[name]
    grammar = json_schema_grammar({"type": "object", "properties": {"a": schema}, "required": ["a"]})
    check_grammar(grammar)
    assert [text for text in right if not accepts(grammar, json.dumps({"a": text}, ensure_ascii=False))] == []
    assert [text for text in wrong if accepts(grammar, json.dumps({"a": text}, ensure_ascii=False))] == []


@pytest.mark.parametrize("name", [name for name, (schema, *_) in ZOD.items() if "(?" in schema.get("pattern", "")])
def test_zods_look_aheads_mean_the_same_beside_the_right_answers(name: str) -> None:
    schema, right, wrong = ZOD[name]
    pattern, dice = schema["pattern"], random.Random(1)
    texts = [*right, *wrong]
    for _ in range(3000):
        text = list(dice.choice(texts))
        for _ in range(dice.randrange(1, 4)):
            place = dice.randrange(len(text) + 1)
            text[place : place + dice.randrange(2)] = dice.choice([*"".join(right), ""])
        texts.append("".join(text))
    assert same(pattern, separated(pattern), texts)


def test_every_sign_means_itself_to_the_library() -> None:
    for sign in set(string.printable) - set("<>"):
        escaped, other = "\\" + sign if sign in string.punctuation else sign, "b" if sign == "a" else "a"
        for pattern in (f"^(?!{escaped})", f"^(?=.|\n)[^{escaped}]$"):
            grammar = json_schema_grammar({"type": "string", "pattern": pattern})
            assert [accepts(grammar, json.dumps(text)) for text in (sign, other)] == [False, True], (pattern, sign)
        grammar = json_schema_grammar({"type": "string", "pattern": f"^(?![^{escaped}])"})
        assert [accepts(grammar, json.dumps(text)) for text in (sign, other)] == [True, False], sign
    assert accepts(json_schema_grammar({"type": "string", "pattern": "^(?!a)[<>]$"}), '"<"')


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        ('^[^"]*$', ["a", "\\", "\n", "\x01", "é"], ['"', 'a"b']),
        (r"^[^\\]$", ['"', "a", "\n"], ["\\"]),
        (r'^[^\\/:*?"<>|]+$', ["a b.txt", "é"], ["a/b", 'a"', "\\a"]),
        (r'^[^"\n]$', ["a", "\\"], ['"', "\n"]),
        (r"^[\x00-!#-\x7e]$", ["a", "\\"], ['"']),
        (r'^(?!a)[^"]+$', ["b", "\\"], ["a", 'b"']),
        (r"^[^,]*$", ["a", '"', "\\", "\x00"], [","]),
    ],
)
def test_a_class_without_quotation_marks_lets_none_through(pattern: str, right: list[str], wrong: list[str]) -> None:
    """llguidance takes an escaped one for a control character if the class holds all of those."""
    grammar = json_schema_grammar({"type": "string", "pattern": pattern})
    check_grammar(grammar)
    assert [text for text in right if not accepts(grammar, json.dumps(text, ensure_ascii=False))] == []
    assert [text for text in wrong if accepts(grammar, json.dumps(text, ensure_ascii=False))] == []


def test_names_of_properties_may_look_ahead() -> None:
    names = {"^(?!x-)[a-z-]+$": {"type": "integer"}, "^x-": {"type": "string"}}
    grammar = json_schema_grammar({"type": "object", "patternProperties": names, "additionalProperties": False})
    check_grammar(grammar)
    assert accepts(grammar, '{"ab": 1, "x-a": "b"}')
    assert not accepts(grammar, '{"x-a": 1}') and not accepts(grammar, '{"-x": "b"}')


def refused(schema: dict[str, Any]) -> str:
    with pytest.raises(Unfit) as caught:
        check_grammar(json_schema_grammar(schema))
    return str(caught.value)


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("^(?<=a)b", "look-behind is not supported"),
        ("^(?<!a)b", "look-behind is not supported"),
        ("^(?!(a)\\1)", "\\1 is not supported beside look-ahead"),
        ("^(?!a\\b)", "\\b is not supported beside look-ahead"),
        ("^(?!\\p{L})", "\\p is not supported beside look-ahead"),
        ("^(?!(?i:a))", "a kind of group that is not supported"),
        ("^(?!a", "a bracket is not closed"),
        ("^(?!a)b)(?=c)", "a bracket is closed that was not opened"),
        ("^(?![a)", "a bracket is not closed"),
        ("(?!a)[b", "a class of characters is not closed"),
        ("^(?!a)*b(?=c)", "nothing to repeat before *"),
        ("^(?![b-a])", "a range of characters without an order"),
        ("^(?!a{2000})", "at most 1000 repetitions"),
        ("^(?!\\u{110000})", "is no character"),
        ("^(?!" + "(" * 60 + ")" * 61, "groups inside each other"),
        ("(?!a)(?=a)", "nothing matches it"),
        ("(?=.*a.{12}b)", "too complex"),
        ("a{900}(?=b{900})", "too complex"),
        ("(a{1000}){1000}(?=b)", "too complex"),
        ("(?:(?=a?b)[ab]?c?){400}(?=d)", "too complex"),
        ("^(?!" + "|".join(f"a{letter}b" * 9 for letter in string.ascii_letters) + ")", "too complex"),
    ],
)
def test_what_is_refused_names_the_pattern_and_the_reason(pattern: str, reason: str) -> None:
    said = refused({"type": "object", "properties": {"a": {"type": "string", "pattern": pattern}}})
    assert said.startswith(f"pattern {pattern[:60]}") and reason in said
    assert len(said) < 200 and separated(pattern).steps <= MAX_STEPS


def test_patterns_of_a_schema_share_a_budget() -> None:
    each = [f"^(?!{letter}.*a.{{2}}b)" for letter in string.ascii_letters + string.digits]
    assert all(separated(pattern).steps < MAX_STEPS for pattern in each)
    assert sum(separated(pattern).steps for pattern in each) > MAX_PATTERN_STEPS
    said = refused({"anyOf": [{"type": "string", "pattern": pattern} for pattern in each]})
    assert said == "too complex: its patterns with look-ahead take more steps than allowed"
    check_grammar(json_schema_grammar({"anyOf": [{"type": "string", "pattern": each[0]} for _ in range(40)]}))


def test_patterns_that_mean_the_same_do_not_hide_each_other() -> None:
    names = {"^(?!a)": {"type": "integer"}, "^(?!(?:a))": {"type": "string"}}
    assert "two patterns that mean the same" in refused({"type": "object", "patternProperties": names})


def test_values_that_look_like_schemas_are_left_alone() -> None:
    grammar = json_schema_grammar({"enum": [{"pattern": "^(?<=a)"}], "default": {"pattern": "^(?!a"}})
    assert accepts(grammar, '{"pattern": "^(?<=a)"}')


def test_a_pattern_is_one_condition_among_others() -> None:
    schema = {"type": "string", "pattern": "^(?!a)(?=.b)[abc]+$", "allOf": [{"pattern": "c$"}], "maxLength": 4}
    grammar = json_schema_grammar(schema)
    check_grammar(grammar)
    assert [text for text in ("bbc", "cbbc", "abc", "bcc", "bbb", "bbbbc") if accepts(grammar, f'"{text}"')] == [
        "bbc",
        "cbbc",
    ]
    assert "allOf" in refused({**schema, "allOf": {"pattern": "c$"}})


def test_sets_of_characters() -> None:
    digits = ((48, 57),)
    assert others(others(digits)) == digits and others(ANY) == () and others(()) == ANY
    assert united([(5, 7), (1, 2), (3, 3), (7, 9)]) == ((1, 3), (5, 9))
    assert sorted(classes([digits, ((50, 70),)])) == [((0, 47), (71, 0x10FFFF)), ((48, 49),), ((50, 57),), ((58, 70),)]
    assert [expression(part) for part in (digits, others(digits), ((45, 45),), ANY)] == [
        "[0-9]",
        "[^0-9]",
        "\\-",
        r"[\s\S]",
    ]


def test_the_automaton_is_the_smallest() -> None:
    assert len(automaton(parsed("^(?!ab|ac)[a-c]{2}$"), Steps()).accepts) == 5
