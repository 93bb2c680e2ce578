"""From messages to the text of a prompt: the checkpoint's chat template, and what stands for pictures and videos."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from models.errors import CheckpointError, InputError
from models.media import ChatMessage
from models.minicpmv.config import Version
from models.published import read_json, read_optional_json

REASONING_MARKERS = ("<think>", "</think>")
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_FIRST_UNUSED, _LAST_UNUSED = 0xFDD0, 0xFDEF
"""Code points that Unicode reserves for a program's own use (noncharacters)."""


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

    def render(self, messages: Sequence[Mapping[str, str]], *, enable_thinking: bool) -> str:
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, enable_thinking=enable_thinking, **self._special_tokens
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
    if not isinstance(source, str):
        raise CheckpointError(f"{directory}: tokenizer_config.json: chat_template must be a string")
    return ChatTemplate(source, tokens)


def turns(messages: Sequence[ChatMessage], media: Sequence[str], shield: Callable[[str], str]) -> list[dict[str, str]]:
    """Template turns: the pieces of a message joined by line breaks, text shielded, items as `media` says.

    Answers before the last question lose their reasoning, as Qwen3's template does it.
    """
    last_question = max((i for i, message in enumerate(messages) if message.role == "user"), default=-1)
    rendered = []
    for index, message in enumerate(messages):
        if message.role not in _ROLES:
            raise InputError("messages", f"role {message.role!r} is not one of {', '.join(_ROLES)}")
        pieces = []
        for part in message.content:
            if part.item is not None:
                pieces.append(media[part.item])
            elif part.text is not None:
                text = part.text
                if message.role == "assistant" and index < last_question:
                    text = text.rpartition(REASONING_MARKERS[1])[2].lstrip("\n")
                pieces.append(shield(text))
        rendered.append({"role": _ROLES[message.role], "content": "\n".join(pieces)})
    return rendered


def unused_character(texts: Sequence[str]) -> str:
    """A character that occurs in none of `texts`."""
    used = set().union(*texts)
    for point in [*range(_FIRST_UNUSED, _LAST_UNUSED + 1), *range(0xF0000, 0xFFFFE)]:
        if chr(point) not in used:
            return chr(point)
    raise InputError("messages", "the text uses every private character of Unicode")


def picture_text(version: Version, grid: tuple[int, int] | None, num_queries: int, image_id: int | None) -> str:
    """Markers and placeholders of a picture: the overview, then the grid (columns, rows) of crops, row by row."""
    placeholders = "<unk>" * num_queries
    overview = f"<image>{placeholders}</image>"
    number = "" if image_id is None else f"<image_id>{image_id}</image_id>"
    if grid is None:
        return number + overview
    columns, rows = grid
    if version == "2.5":
        return overview + "<slice>" + "\n".join([overview * columns] * rows) + "</slice>"
    return number + overview + "\n".join([f"<slice>{placeholders}</slice>" * columns] * rows)


def picture_starts(version: Version) -> tuple[str, ...]:
    """Markers before a run of placeholders; 2.5's <slice> stands around the whole grid."""
    return ("<image>",) if version == "2.5" else ("<image>", "<slice>")


def _token_text(token: str | Mapping[str, Any]) -> str:
    return token if isinstance(token, str) else str(token["content"])


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
