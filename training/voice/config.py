"""What config.json and tokenizer.json of the embedded voice say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PUBLISHED = Path(__file__).parents[2] / "models/embedded/voxcpm2"
CONFIG: dict[str, Any] = json.loads((PUBLISHED / "config.json").read_text(encoding="utf-8"))
_VOCABULARY = json.loads((PUBLISHED / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
"""One token a character."""
BLANK, AUDIO_START = _VOCABULARY["▁"], _VOCABULARY["<|audio_start|>"]
REFERENCE_START, REFERENCE_END = _VOCABULARY["<|audio_prompt_start|>"], _VOCABULARY["<|audio_prompt_end|>"]


def tokens(text: str) -> list[int]:
    """What tokenizer.json makes of a text without doubled blanks: one id a character."""
    unknown = _VOCABULARY["<unk>"]
    return [_VOCABULARY.get(character, unknown) for character in text.lower().replace(" ", "▁")]
