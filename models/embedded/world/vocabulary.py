"""The tokenizer of the model that sees: bytes, and the words of the questions and answers as one token each.

It is byte-level BPE in the published format without a single merge: a piece of text that is a token as a whole is that
token (ignore_merges), everything else is bytes. So printed words are spelled letter by letter, as they are seen.

    python -m models.embedded.world.vocabulary build/vision
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from models.byte_level import byte_alphabet
from models.embedded.world import about_scenes, conversations, keys, small_talk, wordings
from models.embedded.world.grammars import AFTER, BEFORE, GRAMMARS, KEY_WORDS
from models.embedded.world.palette import COLOR_NAMES, SHAPE_NAMES, SIZE_NAMES, plural

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_ANSWERS = (
    *(small_talk.ONLY, small_talk.NO_PICTURE, small_talk.WHO, small_talk.SKILLS, small_talk.HELLO, small_talk.WELCOME),
    *("The is are a an in at the top bottom left right center of above below Yes, No, there no than larger smaller",),
    *("I see no text. It says and line lines the shape shapes has more picture second first third last an empty",),
    *("It is a plain picture. The background is Yes, it is",),
    *("This is a bar chart pie parts bars moves does not move to the up down changes from the largest smallest is in",),
    *("The title is The chart has no title. The labels are",),
    *(" ".join(COLOR_NAMES), " ".join(SHAPE_NAMES), " ".join(map(plural, SHAPE_NAMES)), " ".join(SIZE_NAMES)),
    *(conversations.DEFAULT_SYSTEM, *conversations.SYSTEMS),
    *about_scenes.SPOTS,
)
_JSON = (
    '{"', '":', ' "', '",', '"}', '"},', ' {"', '"}]}', ' [{"', '".', '"?', '",', '."', ' ["', '"],', '[{"',
    *("color", "shape", "count", "text", "label", "value", "answer", "position", "side", "direction", "chart"),
    *("picture", "colors", "title", "labels", '"]', '"]}'),
    *("shapes", "yes", "no", "left", "right", "top", "bottom", "center", "above", "below", "up", "down", "none"),
    *("bar", "pie", "first", "second", "system", "user", "assistant", *COLOR_NAMES, *SHAPE_NAMES),
    *("true", "false", " true", " false", *keys.NAMES, *(" " + name for name in keys.NAMES if name.isalpha())),
)  # fmt: skip


def words() -> list[str]:
    """Tokens that are more than one byte, without order of importance: sorted."""
    found: set[str] = set(_JSON)
    texts: list[str] = list(_ANSWERS)
    for task in GRAMMARS:
        for part in wordings.wordings(task):
            texts += part
    for part in (*wordings.json_wordings(), *wordings.key_wordings()):
        texts += part
    texts += (*KEY_WORDS, *(f"{word}s" for word in KEY_WORDS))
    texts += (*BEFORE, *AFTER)
    for text in texts:
        plain = re.sub(r"\{\w+\}", "", text)
        pieces = re.findall(r"[A-Za-z]+", plain)
        found.update(" " + piece for piece in pieces)
        if pieces:
            first = pieces[0]
            found.update((first, first[0].upper() + first[1:]))
            found.update(" " + piece[0].upper() + piece[1:] for piece in pieces[:1])
    return sorted(token for token in found if len(token) > 1)


def tokenizer() -> dict[str, Any]:
    """tokenizer.json."""
    alphabet = byte_alphabet()
    tokens = [*alphabet, *("".join(alphabet[byte] for byte in word.encode()) for word in words())]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": len(tokens) + i, "content": name, **flags} for i, name in enumerate(SPECIAL_TOKENS)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": SPLIT_PATTERN}, "behavior": "Isolated", "invert": False},
                byte_level,
            ],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [],
        },
    }


if __name__ == "__main__":
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer(), ensure_ascii=False, indent=1) + "\n", "utf-8")
