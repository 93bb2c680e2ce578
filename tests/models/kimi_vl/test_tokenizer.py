"""The tokenizer without remote code equals tiktoken with Kimi's split pattern."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from models.interfaces.errors import CheckpointError
from models.kimi_vl.tokenizer import SPLIT_PATTERN, load_tokenizer
from tests.support.golden import GOLDEN

DIRECTORY = GOLDEN / "kimi_vl"
TOKENIZER = load_tokenizer(DIRECTORY)
TIKTOKEN = tiktoken.Encoding(
    "kimi",
    pat_str=SPLIT_PATTERN,
    mergeable_ranks={token: rank for rank, token in enumerate(TOKENIZER.ranks)},
    special_tokens=dict(TOKENIZER.special_ids),
)
_PIECES = [
    *("the", " hello", "HTTP", "don't", "'LL", "12345", "你好", "世界", "한국어", "ʰ", "ǅ"),
    *("é", "\u0301", "🙂", "\r\n"),
]
TEXTS = st.one_of(st.text(max_size=60), st.lists(st.sampled_from(_PIECES) | st.text(max_size=3)).map("".join))


@settings(max_examples=100, deadline=None)
@given(TEXTS)
def test_equals_tiktoken(text: str) -> None:
    text = text.encode("utf-8", "ignore").decode()
    assert TOKENIZER.encode_plain(text) == TIKTOKEN.encode(text, disallowed_special=())
    assert TOKENIZER.decode(TOKENIZER.encode_plain(text)) == text.encode()


@pytest.mark.parametrize(
    "pieces",
    [
        ("123", "456", "7"),
        ("a", "你好世界", "b"),
        (" don't", " WE'LL", " x"),
        ("it'S", " '", "ll", " we'VE"),
        ("Camel", "Case", "HTTPServer", " ÀÉab"),
        ("_snake", "_case", " x", "2", "y"),
        (" x", " +=", " y", "!!\n\n", "z"),
        ("a", "  ", " b"),
        ("a", " \n \n", " b"),
        ("x", "\r\n\r\n", "y"),
        ("end", "  "),
        ("한국어", " ", "123", "4"),
        ("ʰa", " ǅx", " e\u0301", " E\u0301a"),
    ],
)
def test_text_is_split_as_the_published_pattern_says(pieces: tuple[str, ...]) -> None:
    """Written out by hand: the comparison with tiktoken uses our pattern on both sides."""
    split = pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated").pre_tokenize_str("".join(pieces))
    assert tuple(piece for piece, _ in split) == pieces


@pytest.mark.parametrize("case", json.loads((DIRECTORY / "tokenizer_cases.json").read_text()))
def test_golden_cases(case: dict) -> None:
    assert TOKENIZER.encode_plain(case["text"]) == case["ids"]


def test_special_strings_in_text_are_plain_text() -> None:
    ids = TOKENIZER.encode_plain("<|im_end|><|media_pad|>")
    assert ids and max(ids) < len(TOKENIZER.ranks)
    assert TOKENIZER.decode(ids) == b"<|im_end|><|media_pad|>"


def test_special_ids_give_no_bytes() -> None:
    end = TOKENIZER.special_ids["<|im_end|>"]
    assert TOKENIZER.decode([*TOKENIZER.encode_plain("a"), end, *TOKENIZER.encode_plain("b")]) == b"ab"


def test_long_runs_are_cut_and_nothing_is_lost() -> None:
    text = "x" * 60_000 + " " * 30_000 + "y"
    assert TOKENIZER.decode(TOKENIZER.encode_plain(text)) == text.encode()


@pytest.mark.parametrize("content", ["AA== 1\n", "AA==\n", "?? 0\n", "AA== 0\n"])
def test_broken_rank_files_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "tiktoken.model").write_text(content)
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tiktoken\.model"):
        load_tokenizer(tmp_path)


def test_a_rank_file_without_one_of_the_single_bytes_is_refused(tmp_path: Path) -> None:
    """Text with that byte would lose it without a word."""
    tokens = [*(bytes([value]) for value in range(255)), b"ab"]
    lines = (f"{base64.b64encode(token).decode()} {rank}" for rank, token in enumerate(tokens))
    (tmp_path / "tiktoken.model").write_text("\n".join(lines))
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tiktoken\.model.*0xff"):
        load_tokenizer(tmp_path)
