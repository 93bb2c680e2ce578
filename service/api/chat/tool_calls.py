"""Calls in the text of an answer, separated from it while it is generated.

The text is constrained (service/api/chat/tools.py), so a call that has begun continues as a call: its name, then
its arguments, then the closing tag. The formats are those of models/text/tools.py.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal

from msgspec import UNSET

from models.text.tools import CALL_END, CALL_START
from service.api.chat.tool_schema import CalledFunction, FunctionDelta, ToolCallDelta, ToolCallEntry
from service.api.chat.xml_calls import FUNCTION, Types, XmlCall

CALL_HEAD = '\n{"name": "'
"""What follows the opening tag of every call that the grammar allows, in JSON."""
_NAME = re.compile(r'\s*\{\s*"name"\s*:\s*"([^"\\]*)"')
_COLON = re.compile(r'\s*,\s*"arguments"\s*:\s*(?=\{)')


def joined(deltas: Sequence[ToolCallDelta]) -> list[ToolCallEntry]:
    """Joins the deltas of an answer's calls."""
    begun = [delta for delta in deltas if delta.id is not UNSET]
    arguments: list[list[str]] = [[] for _ in begun]
    for delta in deltas:
        arguments[delta.index].append(delta.function.arguments)
    return [
        ToolCallEntry(str(first.id), CalledFunction(str(first.function.name), "".join(fragments)))
        for first, fragments in zip(begun, arguments, strict=True)
    ]


class JsonObjectEnd:
    """Finds the end of a JSON object that arrives in chunks."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def find(self, text: str) -> int | None:
        """The index in the next chunk behind the brace that closes the object; None if it goes on."""
        for end, character in enumerate(text, 1):
            if self._in_string:
                self._read_string(character)
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    return end
        return None

    def _read_string(self, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False


class JsonCall:
    """Reads a call from behind its opening tag, in chunks: a JSON object with `name` and `arguments`."""

    def __init__(self) -> None:
        self._held = ""
        self._state: Literal["name", "colon", "arguments", "end"] = "name"
        self._arguments = JsonObjectEnd()

    def feed(self, text: str) -> tuple[list[FunctionDelta], str | None]:
        """(parts of the call, what follows its closing tag; None while it goes on)."""
        self._held += text
        deltas: list[FunctionDelta] = []
        if self._state == "name" and (found := _NAME.match(self._held)):
            self._state, self._held = "colon", self._held[found.end() :]
            deltas.append(FunctionDelta("", found[1]))
        if self._state == "colon" and (found := _COLON.match(self._held)):
            self._state, self._held = "arguments", self._held[found.end() :]
        if self._state == "arguments" and self._held:
            end = self._arguments.find(self._held)
            deltas.append(FunctionDelta(self._held[:end]))
            self._held = "" if end is None else self._held[end:]
            self._state = "arguments" if end is None else "end"
        _, tag, rest = self._held.partition(CALL_END) if self._state == "end" else ("", "", "")
        return deltas, rest if tag else None


class ToolCallParser:
    """Splits an answer into text and calls. What it returns does not depend on how the text is cut into chunks.

    calls: number of calls that have begun. White space around calls is dropped. forced: the answer consists of calls,
    so it has no text, even if it is cut within the first tag. either: the answer consists of calls, or of a text that
    matches a format: tags inside that text belong to it. xml: the types of each function's parameters, where calls are
    in the form of service/api/chat/xml_calls.py.
    """

    def __init__(
        self,
        *,
        forced: bool = False,
        either: bool = False,
        xml: Mapping[str, Mapping[str, Types]] | None = None,
    ) -> None:
        self.calls = 0
        self.forced = forced
        self._state: Literal["undecided", "said", "text", "call"]
        self._state = "undecided" if either and not forced else "text"
        self._held = ""
        self._new_call: Callable[[], JsonCall | XmlCall] = JsonCall if xml is None else partial(XmlCall, xml)
        self._opening = CALL_START + (CALL_HEAD if xml is None else FUNCTION)
        self._call: JsonCall | XmlCall = self._new_call()

    @property
    def in_call(self) -> bool:
        """Whether the text so far ends between the tags of a call, or of what may still become one."""
        if self._state == "undecided":
            return self._held.lstrip("\n").startswith(CALL_START)
        return self._state == "call"

    def feed(self, text: str) -> tuple[str, list[ToolCallDelta]]:
        """(text, parts of calls) of the next chunk."""
        self._held += text
        said, deltas = "", []
        while True:
            state = self._state
            if state == "undecided":
                self._decide()
            elif state == "said":
                said, self._held = said + self._held, ""
            elif state == "text":
                said += self._take_text()
            else:
                deltas += self._take_call()
            if self._state == state:
                return said, deltas

    def flush(self, *, complete: bool = False) -> str:
        """Text that was held back, at the end of the answer. A call without a name is dropped. complete: the answer
        has ended by itself, so what might have become a call is a text."""
        text = (complete and self._state == "undecided") or not self.in_call
        held, self._held = self._held, ""
        return held if text and not self.forced and not (self.calls and held.isspace()) else ""

    def _decide(self) -> None:
        """Whether the answer is calls or a text, as soon as its beginning tells."""
        begun = self._held.lstrip("\n")
        if begun.startswith(self._opening):
            self._state = "text"
        elif not self._opening.startswith(begun):
            self._state = "said"

    def _take_text(self) -> str:
        """Text up to the next tag. Holds back what may be the beginning of a tag, and white space that may precede
        one."""
        head, tag, rest = self._held.partition(CALL_START)
        if tag:
            self._state, self._held, self._call = "call", rest, self._new_call()
            return head.rstrip()
        kept = next((n for n in range(len(CALL_START) - 1, 0, -1) if head.endswith(CALL_START[:n])), 0)
        said = head[: len(head) - kept].rstrip()
        self._held = head[len(said) :]
        return said

    def _take_call(self) -> list[ToolCallDelta]:
        """What has come of the call."""
        parts, rest = self._call.feed(self._held)
        if rest is not None:
            self._state = "text"
        self._held = rest or ""
        deltas = []
        for part in parts:
            if part.name is UNSET:
                deltas.append(ToolCallDelta(self.calls - 1, part))
            else:
                self.calls += 1
                deltas.append(ToolCallDelta(self.calls - 1, part, f"call_{secrets.token_hex(12)}", "function"))
        return deltas
