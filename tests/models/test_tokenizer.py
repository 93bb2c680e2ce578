"""Files that published tokenizers come in: what transformers ignores in them changes no ids here either."""

from __future__ import annotations

import json
from typing import Any

import pytest

from models.tokenizer import Tokenizer
from tests.support.golden import GOLDEN, read_json

FAMILIES = ("qwen2_vl", "minicpmv_2_5", "minicpmv_4_0")
"""Byte-level; byte-level with an opening token; with byte fallback and an opening token."""
TEXT = "<|im_start|>user\nA text that is longer than the eight tokens of training.<|im_end|>"
ESCAPE = "\ufdd0"
TRUNCATION = {"direction": "Right", "max_length": 8, "strategy": "LongestFirst", "stride": 0}
PADDING = {
    "strategy": {"Fixed": 64},
    "direction": "Left",
    "pad_to_multiple_of": None,
    "pad_id": 0,
    "pad_type_id": 0,
    "pad_token": "!",
}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("left", [{"truncation": TRUNCATION}, {"padding": PADDING}], ids=["truncation", "padding"])
def test_what_training_left_in_the_file_changes_no_ids(family: str, left: dict[str, Any]) -> None:
    published = read_json(GOLDEN / family, "tokenizer.json")
    usual, trained = Tokenizer(published), Tokenizer({**published, **left})
    assert trained.encode(TEXT, ESCAPE) == usual.encode(TEXT, ESCAPE)
    assert trained.encode_plain(TEXT) == usual.encode_plain(TEXT)
    handed_on = trained.without_specials([0])
    if handed_on is not None:
        assert json.loads(handed_on)["truncation"] is json.loads(handed_on)["padding"] is None
