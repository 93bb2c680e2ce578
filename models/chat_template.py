"""The checkpoint's chat template in a Jinja sandbox. User text goes in shielded: see models/tokenizer.py."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from models.errors import CheckpointError, InputError
from models.published import read_json, read_optional_json

_FIRST_UNUSED, _LAST_UNUSED = 0xFDD0, 0xFDEF
"""Code points that Unicode reserves for a program's own use (noncharacters)."""


_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


def template_role(role: str) -> str:
    """The role that templates know for one of the interface. Raises InputError for any other."""
    if role not in _ROLES:
        raise InputError("messages", f"role {role!r} is not one of {', '.join(_ROLES)}")
    return _ROLES[role]


class ChatTemplate:
    """The Jinja template of tokenizer_config.json (or chat_template.jinja), in a sandbox."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise CheckpointError(f"chat template cannot be read: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]], **options: bool) -> str:
        """The prompt up to the answer. options: variables that the template knows, such as enable_thinking."""
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, **options, **self._special_tokens
            )
        except TemplateError as error:
            raise InputError("messages", f"the chat template refuses these messages: {error}") from error


def load_chat_template(directory: Path) -> ChatTemplate:
    config = read_json(directory, "tokenizer_config.json")
    special = {**config, **read_optional_json(directory, "special_tokens_map.json")}
    names = ("bos_token", "eos_token", "pad_token", "unk_token")
    tokens = {name: _token_text(special[name]) for name in names if special.get(name) is not None}
    file = directory / "chat_template.jinja"
    source = file.read_text(encoding="utf-8") if file.exists() else config.get("chat_template")
    if source is None:
        source = read_optional_json(directory, "chat_template.json").get("chat_template")
    if not isinstance(source, str):
        raise CheckpointError(f"{directory}: tokenizer_config.json: chat_template must be a string")
    return ChatTemplate(source, tokens)


def unused_character(texts: Sequence[str]) -> str:
    """A character that occurs in none of `texts`."""
    used = set().union(*texts)
    for point in chain(range(_FIRST_UNUSED, _LAST_UNUSED + 1), range(0xF0000, 0xFFFFE)):
        if chr(point) not in used:
            return chr(point)
    raise InputError("messages", "the text uses every private character of Unicode")


def _token_text(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
