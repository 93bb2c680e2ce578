"""Calls in the form of Qwen3-Coder and Qwen3.5:

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

A value is the text itself where the schema asks for a string, which may be any, and JSON elsewhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from models.interfaces.media import Tool
from models.text.tools import CALL_END
from service.api.chat.schema import FunctionDelta
from service.api.structured.schema_form import MAX_DEPTH, as_grammar, target

FUNCTION = "\n<function="
"""What follows the opening tag of a call."""
RULE = """text[lazy]: TEXT "\\n</parameter>" """
Types = frozenset[str]

_NAME = re.compile(r"\s*<function=([^\n]*)>\n")
_PARAMETER = re.compile(r"\s*<parameter=([^\n]*)>\n")
_FUNCTION_END = re.compile(r"\s*</function>")
_VALUE_END = "\n</parameter>"
_TYPE_NAMES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
_ALL: Types = frozenset({*_TYPE_NAMES.values(), "null"})
_STRING: Types = frozenset({"string"})


class XmlFunction:
    """A function whose parameters have the form of a grammar (service/api/structured/schema_form.py)."""

    def __init__(self, tool: Tool) -> None:
        self._name, self._schema = tool.name, tool.parameters
        self._required = frozenset(tool.parameters.get("required", ()))
        self._of_references: dict[str, Types] = {}
        listed = tool.parameters.get("properties", {})
        parts = {key: part for key, part in listed.items() if part is not False}
        parts |= {key: {} for key in sorted(self._required - listed.keys())}
        self._parts = {key: self._resolved(part if isinstance(part, dict) else {}) for key, part in parts.items()}
        self.types = {key: self._types(part) for key, part in self._parts.items()}

    def grammar(self, blanks: str, others: str) -> tuple[str, str]:
        """(what follows FUNCTION: the name, the listed parameters in their order, others if they are allowed, and the
        end of the function; the rule `others`: opening tags of parameters that are not listed, whose values are any
        text). blanks: pattern of white space in JSON."""
        parts, keys = [json.dumps(f"{self._name}>\n")], (*self._parts, *self._schema.get("properties", {}))
        tags = {key: json.dumps(f"<parameter={key}>\n", ensure_ascii=False) for key in keys}
        for key in self._parts:
            parameter = f'{tags[key]} {self._value(key, blanks)} "\\n"'
            parts.append(parameter if key in self._required else f"({parameter})?")
        if self._schema.get("additionalProperties", True) is not False:
            parts.append(f'({others} text "\\n")*')
        unlisted = f" & ~({' | '.join(tags.values())})" if tags else ""
        return " ".join([*parts, '"</function>"']), f"{others}: /<parameter=[^>\\n]+>\\n/{unlisted}"

    def _value(self, key: str, blanks: str) -> str:
        part = self._parts[key]
        if (literals := _literals(part)) is not None:
            quoted = (json.dumps(literal, ensure_ascii=False) for literal in literals)
            return f"({' | '.join(quoted)}) {json.dumps(_VALUE_END)}"
        if "string" in self.types[key]:
            return "text"
        shared = {name: self._schema[name] for name in ("$defs", "definitions") if name in self._schema}
        form = json.dumps(as_grammar({**part, **shared}, blanks), ensure_ascii=False)
        return f"%json {form} {json.dumps(_VALUE_END)}"

    def _resolved(self, part: dict[str, Any]) -> dict[str, Any]:
        """The schema that a reference leads to, with what stands beside the reference."""
        for _ in range(MAX_DEPTH):
            found = target(self._schema, part["$ref"]) if "$ref" in part else None
            if not isinstance(found, dict):
                break
            part = {**found, **{name: value for name, value in part.items() if name != "$ref"}}
        return part

    def _types(self, part: Any) -> Types:
        """The types that a schema allows."""
        types = _ALL
        for name, value in part.items() if isinstance(part, dict) else ():
            match name:
                case "type":
                    allowed = frozenset(value if isinstance(value, list) else [value])
                case "enum" | "const":
                    allowed = frozenset(_type(one) for one in (value if name == "enum" else [value]))
                case "anyOf" | "oneOf":
                    allowed = frozenset().union(*map(self._types, value))
                case "$ref":
                    allowed = self._of_reference(value)
                case _:
                    continue
            types &= allowed | {"integer"} if "number" in allowed else allowed
        return types

    def _of_reference(self, reference: str) -> Types:
        if reference not in self._of_references:
            self._of_references[reference] = _ALL  # for what refers to itself
            self._of_references[reference] = self._types(target(self._schema, reference))
        return self._of_references[reference]


def held_back(text: str, marker: str) -> int:
    """Characters at the end of a text that may be the beginning of the marker."""
    longest = min(len(text), len(marker) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(marker[:length])), 0)


def split_at(text: str, marker: str) -> tuple[str, bool, str]:
    """(what precedes the marker, whether it is there, the rest: what follows it or may be its beginning)."""
    head, found, rest = text.partition(marker)
    if found:
        return head, True, rest
    end = len(text) - held_back(text, marker)
    return text[:end], False, text[end:]


def _type(value: Any) -> str:
    return _TYPE_NAMES.get(type(value), "null")


def _literals(part: Mapping[str, Any]) -> list[str] | None:
    """The values of a schema that lists strings alone."""
    values = [part["const"]] if "const" in part else part.get("enum")
    if not values or not all(isinstance(value, str) and _VALUE_END not in value for value in values):
        return None
    return list(values)


class XmlCall:
    """Reads a call from behind its opening tag, in chunks.

    functions: the types of the listed parameters (XmlFunction.types) by the name of the function.
    """

    def __init__(self, functions: Mapping[str, Mapping[str, Types]]) -> None:
        self._functions = functions
        self._held = ""
        self._state: Literal["name", "parameters", "value", "end"] = "name"
        self._parameters: Mapping[str, Types] = {}
        self._types = _STRING
        self._count = 0

    def feed(self, text: str) -> tuple[list[FunctionDelta], str | None]:
        """(parts of the call, what follows its closing tag; None while it goes on)."""
        self._held += text
        deltas: list[FunctionDelta] = []
        while True:
            state = self._state
            if state == "name" and (found := self._take(_NAME)):
                self._state, self._parameters = "parameters", self._functions.get(found[1], {})
                deltas += [FunctionDelta("", found[1]), FunctionDelta("{")]
            elif state == "parameters":
                deltas += self._take_parameter()
            elif state == "value":
                deltas += self._take_value()
            elif state == "end":
                _, tag, rest = self._held.partition(CALL_END)
                return deltas, rest if tag else None
            if state == self._state:
                return deltas, None

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        found = pattern.match(self._held)
        if found is not None:
            self._held = self._held[found.end() :]
        return found

    def _take_parameter(self) -> list[FunctionDelta]:
        """The beginning of a parameter, or the end of the function."""
        if found := self._take(_PARAMETER):
            comma = ", " if self._count else ""
            self._state, self._types = "value", self._parameters.get(found[1], _ALL)
            self._count += 1
            quote = '"' if self._types == _STRING else ""
            return [FunctionDelta(f"{comma}{json.dumps(found[1], ensure_ascii=False)}: {quote}")]
        if self._take(_FUNCTION_END):
            self._state = "end"
            return [FunctionDelta("}")]
        return []

    def _take_value(self) -> list[FunctionDelta]:
        """The value as far as it has come. One that may be text or JSON is held back to its end."""
        head, ended, rest = split_at(self._held, _VALUE_END)
        if ended:
            self._state = "parameters"
        elif self._types != _STRING and "string" in self._types:
            return []
        self._held, fragment = rest, head
        if self._types == _STRING:
            fragment = json.dumps(head, ensure_ascii=False)[1:-1] + ('"' if ended else "")
        elif "string" in self._types and not _parses(head, self._types):
            fragment = json.dumps(head, ensure_ascii=False)
        return [FunctionDelta(fragment)] if fragment else []


def _parses(text: str, types: Types) -> bool:
    try:
        return _type(msgspec.json.decode(text)) in types
    except (msgspec.DecodeError, RecursionError):
        return False
