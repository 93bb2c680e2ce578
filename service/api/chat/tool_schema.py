"""Tools in requests and answers, as in OpenAI's API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType


class FunctionDefinition(msgspec.Struct, frozen=True):
    """parameters: JSON Schema of an object; without it the function has none. PHP writes an empty one as []. strict:
    refuses a schema with keywords that are not supported, which are otherwise not enforced."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | list[Any] | None = None
    strict: bool | None = None


class ToolDefinition(msgspec.Struct, frozen=True):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(msgspec.Struct, frozen=True):
    name: str


class NamedToolChoice(msgspec.Struct, frozen=True, tag_field="type", tag="function"):
    function: NamedFunction


class AllowedTools(msgspec.Struct, frozen=True):
    """mode: auto: text, or text followed by calls of these tools; required: only calls of them."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedToolChoice], Meta(min_length=1)]


class AllowedToolsChoice(msgspec.Struct, frozen=True, tag_field="type", tag="allowed_tools"):
    """The prompt names all tools of the request; some of them may be called."""

    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolsChoice


class FunctionDelta(msgspec.Struct, frozen=True):
    """name: in the first delta of a call, whose arguments are empty. arguments: the next characters of the JSON."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct, frozen=True):
    """index: of the call in its answer. id, type: in the first delta of a call."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class CalledFunction(msgspec.Struct, frozen=True):
    """arguments: a JSON object, as a string."""

    name: str
    arguments: str


class ToolCallEntry(msgspec.Struct, frozen=True):
    """A call of an answer, in the form in which the next request sends it back."""

    id: str
    function: CalledFunction
    type: Literal["function"] | None = "function"
