"""From messages to the text of a prompt: turns for the chat template, and what stands for pictures and videos."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from models.chat_template import template_role
from models.media import ChatMessage
from models.minicpmv.config import Version

REASONING_MARKERS = ("<think>", "</think>")


def turns(messages: Sequence[ChatMessage], media: Sequence[str], shield: Callable[[str], str]) -> list[dict[str, str]]:
    """Template turns: the pieces of a message joined by line breaks, text shielded, items as `media` says.

    Answers before the last question lose their reasoning, as Qwen3's template does it.
    """
    last_question = max((i for i, message in enumerate(messages) if message.role == "user"), default=-1)
    rendered = []
    for index, message in enumerate(messages):
        role = template_role(message.role)
        pieces = []
        for part in message.content:
            if part.item is not None:
                pieces.append(media[part.item])
            elif part.text is not None:
                text = part.text
                if message.role == "assistant" and index < last_question:
                    text = text.rpartition(REASONING_MARKERS[1])[2].lstrip("\n")
                pieces.append(shield(text))
        rendered.append({"role": role, "content": "\n".join(pieces)})
    return rendered


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
