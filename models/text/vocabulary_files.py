"""vocab.json and merges.txt, which transformers' tokenizers without the `tokenizers` library wrote instead of
tokenizer.json. The files do not say how text is split before it is merged, so the class must be known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from models.checkpoints.published import read_json, read_optional_json
from models.interfaces.errors import CheckpointError

VOCAB, MERGES = "vocab.json", "merges.txt"

_QWEN2 = frozenset(
    {"Qwen2Tokenizer", "Qwen2TokenizerFast", "MiniCPMVTokenizer", "MiniCPMVTokenizerFast"}  # MiniCPM-V 2.6 and 4.5
)
_QWEN2_PATTERN = "|".join(
    [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?\p{L}+",
        r"\p{N}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


def tokenizer_of_vocabulary(directory: Path) -> dict[str, Any]:
    """What tokenizer.json would hold, without added tokens, from the two files of a checkpoint that has none. Raises
    CheckpointError if one is missing or damaged, or if tokenizer_config.json names another class than Qwen2's."""
    config = read_optional_json(directory, "tokenizer_config.json")
    name = config.get("tokenizer_class")
    if name not in _QWEN2 or not ((directory / VOCAB).exists() and (directory / MERGES).exists()):
        raise CheckpointError(
            f"{directory}: tokenizer.json is missing. {VOCAB} and {MERGES} can take its place for Qwen2Tokenizer; here "
            f"tokenizer_class is {name!r}. AutoTokenizer.from_pretrained(...).save_pretrained(...) of transformers "
            "writes the file"
        )
    vocabulary = read_json(directory, VOCAB)
    if not all(type(token_id) is int and token_id >= 0 for token_id in vocabulary.values()):
        raise CheckpointError(f"{directory}: {VOCAB} must give an id of at least 0 for every token")
    merges = _merges(directory, vocabulary)
    return {**byte_pairs(_QWEN2_PATTERN, vocabulary, merges), "normalizer": {"type": "NFC"}}


def byte_pairs(pattern: str, vocabulary: Mapping[str, int], merges: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """The tokenizer.json of a byte-level BPE. pattern: of the pieces that text is split into first."""
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocabulary, "merges": merges},
    }


def _merges(directory: Path, vocabulary: dict[str, Any]) -> list[tuple[str, str]]:
    try:
        lines = (directory / MERGES).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{directory}: {MERGES} cannot be read: {error}") from error
    merges: list[tuple[str, str]] = []
    for number, line in enumerate(lines, start=1):
        pair = line.split()
        if not pair or (number == 1 and line.startswith("#version:")):
            continue
        if len(pair) != 2 or not {*pair, "".join(pair)} <= vocabulary.keys():
            raise CheckpointError(f"{directory}: {MERGES}: line {number} is no pair of tokens of {VOCAB}")
        merges.append((pair[0], pair[1]))
    return merges
