"""The checkpoint's chat template in a Jinja sandbox. User text goes in escaped: see models/text/tokenizer.py."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import lru_cache, partial
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Environment, Template, TemplateError, meta, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from models.checkpoints.published import read_optional_json
from models.interfaces.errors import CheckpointError, InputError
from models.interfaces.media import CallFormat, ChatMessage, ContentPart
from models.text.tools import CALL_START, Escape, Turn, hermes_turns

log = logging.getLogger(__name__)

_FIRST_UNUSED, _LAST_UNUSED = 0xFDD0, 0xFDEF
"""Code points that Unicode reserves for a program's own use (noncharacters)."""

_PROBE = "a text to look for"
_CALL = {"type": "function", "function": {"name": "look", "arguments": {}}}

_OTHER_CALLS = "<arg_key>"
"""What templates hold that write calls inside the same tags in another way than models/text/tools.py describes."""

THINKING = ("<think>", "</think>")
"""Markers around the reasoning of most models."""

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


def template_role(role: str) -> str:
    """The role that templates use for a role of the API. Raises InputError for an unknown one."""
    if role not in ROLES:
        raise InputError("messages", f"role {role!r} is not one of {', '.join(ROLES)}")
    return ROLES[role]


def escaped_reasoning(message: ChatMessage, escape: Escape) -> Turn:
    """The field of a template's turn that has an earlier answer's reasoning, as Qwen3's template reads it; no field
    where there is none. Line breaks around it, which that template strips, are left out for others, too."""
    return {} if message.reasoning is None else {"reasoning_content": escape(message.reasoning.strip("\n"))}


def reasoning_apart(message: ChatMessage) -> ChatMessage:
    """An answer apart from the reasoning that its text holds between THINKING, as Qwen3's template divides it. The
    template would do it itself, but does not recognise escaped markers."""
    text = "".join(part.text or "" for part in message.content)
    items = any(part.item is not None for part in message.content)
    if message.role != "assistant" or message.reasoning is not None or items or THINKING[1] not in text:
        return message
    thought = text.partition(THINKING[1])[0].rstrip("\n").rpartition(THINKING[0])[2].lstrip("\n")
    answer = text.rpartition(THINKING[1])[2].lstrip("\n")
    return replace(message, content=(ContentPart(text=answer),), reasoning=thought)


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}, with which templates mark answers for training: what is inside, with
    variables of its own, as in transformers."""

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class ChatTemplate:
    """A Jinja template in a sandbox.

    variables: what it reads.
    knows_tools: it renders tools, calls and results itself, with calls as models/text/tools.py describes them.
    call_format: the form of these calls.
    parts_only: the roles whose texts it shows only if they come as a list of parts. A string, which is a list of
        characters to it, it would leave out without an error.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        try:
            self._template, self.variables = _compiled(source)
        except TemplateError as error:
            raise CheckpointError(f"chat template cannot be read: {error}") from error
        self._special_tokens = dict(special_tokens)
        self.knows_tools = "tools" in self.variables and CALL_START in source and _OTHER_CALLS not in source
        self.call_format: CallFormat = "xml" if self.knows_tools and "<function=" in source else "json"
        roles = ("system", "user", "assistant", *(["tool"] if self.knows_tools else []))
        self.parts_only = frozenset(role for role in roles if self._shows_parts_only(role))

    def render(self, messages: Sequence[Turn], *, tools: Sequence[Mapping[str, Any]] = (), **options: Any) -> str:
        """The prompt up to the answer. tools: from escaped_tools; a template that knows none gets them in the system
        message. options: variables that the template knows, such as enable_thinking."""
        # transformers always defines both.
        given: dict[str, Any] = {"tools": None, "documents": None, **options}
        if not self.knows_tools:
            messages = hermes_turns(messages, tools)
        elif tools:
            given["tools"] = tools
        messages = [self._turn(message) for message in messages]
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **given, **self._special_tokens)
        except TemplateError as error:
            raise InputError("messages", f"the chat template refuses these messages: {error}") from error
        except Exception as error:  # whatever Python's methods of strings and numbers raise, perhaps with text of them
            text = f"the chat template cannot render these messages ({type(error).__name__})"
            # A template for text joins the content as a string; pictures make it a list of parts.
            if isinstance(error, TypeError) and any(isinstance(message["content"], list) for message in messages):
                text = "the checkpoint's chat template is for text alone: it takes no pictures or videos"
            raise InputError("messages", text) from error

    def _turn(self, message: Turn) -> Turn:
        text = message["content"]
        if message["role"] not in self.parts_only or not isinstance(text, str):
            return message
        return {**message, "content": _as_part(text)}

    def _shows_parts_only(self, role: str) -> bool:
        return not self._shows({"role": role, "content": _PROBE}) and self._shows(
            {"role": role, "content": _as_part(_PROBE)}
        )

    def _shows(self, turn: Turn) -> bool:
        """Whether a message with _PROBE in its content is in the prompt of a conversation that the template does not
        refuse: of some, all others must be lists of parts, or the first one the system's."""
        given = {"tools": None, "documents": None, **self._special_tokens}
        for turns in _conversations_with(turn):
            try:
                if _PROBE in self._template.render(messages=turns, add_generation_prompt=True, **given):
                    return True
            except Exception:  # A template can raise whatever Python's methods of strings and numbers raise.
                log.debug("the chat template refuses a message of %s", turn["role"], exc_info=True)
        return False


@lru_cache(maxsize=16)
def _compiled(source: str) -> tuple[Template, frozenset[str]]:
    """A template and the variables that it expects. Fine-tuned checkpoints often share one, and compiling takes tens of
    milliseconds."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    parsed = environment.parse(source)
    return environment.from_string(parsed), frozenset(meta.find_undeclared_variables(parsed))


def _conversations_with(turn: Turn) -> Iterator[list[Turn]]:
    """Conversations in which a message of this role may stand, the usual ones first."""
    role = turn["role"]
    contents: tuple[Any, ...] = ("?", _as_part("?"))
    for content in contents:
        system, question = {"role": "system", "content": content}, {"role": "user", "content": content}
        calls = {"role": "assistant", "content": content, "tool_calls": [_CALL]}
        if role == "system":
            yield [turn, question]
            continue
        places = {"user": [turn], "assistant": [question, turn, question], "tool": [question, calls, turn]}
        turns: list[Turn] = places[role]
        yield turns
        yield [system, *turns]


def _as_part(text: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text}]


def load_chat_template(directory: Path) -> ChatTemplate:
    """The first of chat_template.json, chat_template.jinja and tokenizer_config.json, the order in which transformers
    reads them for processors: the last one may hold the language model's own, without pictures, and so may the second,
    which newer tokenizers save beside the first."""
    config = read_optional_json(directory, "tokenizer_config.json")
    special = {**config, **read_optional_json(directory, "special_tokens_map.json")}
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    tokens = {name: _token_text(special[name]) for name in names if special.get(name) is not None}
    name, source = _template_source(directory, config)
    if source is None:
        raise CheckpointError(
            f"{directory}: no chat template: chat_template.json, chat_template.jinja or tokenizer_config.json must "
            "hold one; the checkpoint that this one was made from has it"
        )
    if not isinstance(source, str):
        raise CheckpointError(f"{directory}: {name}: chat_template must be a string; several templates are not hosted")
    return ChatTemplate(source, tokens)


def _template_source(directory: Path, tokenizer_config: Mapping[str, Any]) -> tuple[str, Any]:
    """The file that holds the template, and the template's text."""
    published = read_optional_json(directory, "chat_template.json").get("chat_template")
    if published is not None:
        return "chat_template.json", published
    jinja = directory / "chat_template.jinja"
    if jinja.exists():
        try:
            return jinja.name, jinja.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{directory}: {jinja.name} cannot be read: {error}") from error
    return "tokenizer_config.json", tokenizer_config.get("chat_template")


def unused_character(texts: Sequence[str]) -> str:
    """A character that occurs in none of `texts`."""
    used = set().union(*texts)
    for point in chain(range(_FIRST_UNUSED, _LAST_UNUSED + 1), range(0xF0000, 0xFFFFE)):
        if chr(point) not in used:
            return chr(point)
    raise InputError("messages", "the text uses every private character of Unicode")


def escape_with(character: str, inside: Callable[[str, str], str]) -> Escape:
    """Texts with `character` in each literal special token (inside(text, character): a tokenizer's escape) and at both
    ends, because two texts must not make a special token where they meet. White space around a text stays outside:
    no special token has any, and templates strip it. An empty text stays one, which templates ask for."""

    def escape(text: str) -> str:
        core = text.strip()
        if not core:
            return text
        before, _, after = text.partition(core)
        return before + character + inside(core, character) + character + after

    return escape


def _token_text(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
