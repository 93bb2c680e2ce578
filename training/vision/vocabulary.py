"""The tokenizer of the model that sees: bytes, and the words of the questions and answers as one token each.

It is byte-level BPE in the published format without a single merge: a piece of text that is a token as a whole is that
token (ignore_merges), everything else is bytes. So printed words are spelled letter by letter, as they are seen.

    python -m training.vision.vocabulary build/vision
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from models.text.tokenizer import byte_alphabet
from training.vision import conversations, questions, wordings
from training.vision.pictures import COLOR_NAMES, SHAPE_NAMES, SIZE_NAMES, SPELLED, plural

PUBLISHED = Path(__file__).parents[2] / "models/embedded/qwen2_vl"
"""The checkpoint; what its tokenizer.json says beside the words is kept."""
CONFIG: dict[str, Any] = json.loads((PUBLISHED / "config.json").read_text(encoding="utf-8"))
_DATA = json.loads((Path(__file__).parent / "words.json").read_text(encoding="utf-8"))
_COLORS = tuple(name for name in COLOR_NAMES if name not in SPELLED)
_ANSWERS = (
    *(questions.ONLY, questions.NO_PICTURE, *questions.SAID.values(), *_DATA["answers"]),
    *map(" ".join, (_COLORS, SHAPE_NAMES, map(plural, SHAPE_NAMES), SIZE_NAMES)),
    *(conversations.DEFAULT_SYSTEM, *conversations.DATA["systems"], *questions.SPOTS),
)
_JSON = (
    *(*_DATA["json tokens"], *_COLORS, *SHAPE_NAMES, *wordings.KEYS),
    *(" " + name for name in wordings.KEYS if name.isalpha()),
)


def words() -> list[str]:
    """Tokens that are more than one byte, without order of importance: sorted."""
    found: set[str] = set(_JSON)
    texts: list[str] = list(_ANSWERS)
    for task in wordings.QUESTIONS:
        texts += [text for part in wordings.wordings(task) for text in part]
    for kind in ("json", "json with keys"):
        texts += [text for part in wordings.wishes(kind) for text in part]
    texts += (*wordings.KEY_WORDS, *(f"{word}s" for word in wordings.KEY_WORDS))
    texts += (*wordings.GRAMMARS["before"], *wordings.GRAMMARS["after"])
    for text in texts:
        pieces = re.findall(r"[A-Za-z]+", re.sub(r"\{\w+\}", "", text))
        found.update(" " + piece for piece in pieces)
        if pieces:
            first = pieces[0]
            found.update((first, first[0].upper() + first[1:], " " + first[0].upper() + first[1:]))
    return sorted(token for token in found if len(token) > 1)


def tokenizer() -> dict[str, Any]:
    """tokenizer.json of the published one with the words of today."""
    content: dict[str, Any] = json.loads((PUBLISHED / "tokenizer.json").read_text(encoding="utf-8"))
    alphabet = byte_alphabet()
    tokens = [*alphabet, *("".join(alphabet[byte] for byte in word.encode()) for word in words())]
    content["model"]["vocab"] = {token: index for index, token in enumerate(tokens)}
    for index, special in enumerate(content["added_tokens"]):
        special["id"] = len(tokens) + index
    return content


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer(), ensure_ascii=False, indent=1) + "\n", "utf-8")
