"""Items, of /v1/responses and of Realtime, as messages of a chat request, and where in them its errors are."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import msgspec

from service.api.chat.schema import Message

Source = TypeVar("Source")
Names = Sequence[tuple[str, str]]
"""Patterns of paths in a chat request, and the names of these elsewhere."""

IN_MESSAGE = re.compile(r"messages\[(\d+)\](?:\.tool_calls\[(\d+)\])?(.*)")
IN_ITEM: Names = ((r"(.*\.image_url)\.url", r"\1"), (r"\.tool_call_id|\.id", ".call_id"), (r"\.function(\..*)", r"\1"))


@dataclass(eq=False)
class Turn(Generic[Source]):
    """A message. source: the item that it stands for, if it is one. calls: the items of its calls."""

    message: Message
    source: Source | None = None
    calls: list[Source] = field(default_factory=list)


def joined(turns: Iterable[Turn[Source]]) -> list[Turn[Source]]:
    """Make one message of reasoning, text and calls of the assistant that follow each other."""
    result: list[Turn[Source]] = []
    for turn in turns:
        said = turn.message
        last = result[-1] if result and result[-1].message.role == said.role == "assistant" else None
        if last is not None and said.tool_calls:
            if last.message.tool_calls is None:
                last.message = msgspec.structs.replace(last.message, tool_calls=said.tool_calls)
            else:
                last.message.tool_calls.extend(said.tool_calls)
            last.calls += turn.calls
        elif last is not None and last.message.content is None and not last.calls and said.reasoning_content is None:
            last.message = msgspec.structs.replace(said, reasoning_content=last.message.reasoning_content)
            last.source = turn.source
        else:
            result.append(turn)
    return result


def located(path: str, turns: Sequence[Turn[Source]]) -> tuple[Source | None, str] | None:
    """(the source of the item that a path of a chat request is in, the path within the item); None if it is in none."""
    found = IN_MESSAGE.fullmatch(path)
    if found is None or int(found[1]) >= len(turns):
        return None
    turn, rest = turns[int(found[1])], found[3]
    if turn.message.role == "tool":
        rest = rest.replace(".content", ".output", 1)
    return turn.calls[int(found[2])] if found[2] else turn.source, translated(rest, IN_ITEM)


def translated(path: str, names: Names) -> str:
    """The name of a path that a pattern matches; others stay."""
    found = ((re.fullmatch(pattern, path), name) for pattern, name in names)
    return next((match.expand(name) for match, name in found if match), path)
