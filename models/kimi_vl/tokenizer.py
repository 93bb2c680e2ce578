"""Kimi's byte-pair tokenizer without remote code: tiktoken.model read into the `tokenizers` library.

tiktoken merges the adjacent pair whose joined token ranks lowest. The same choice follows from a merge list that holds
every split of every token into two known pieces, in order of the token's rank.
"""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from models.checkpoints.published import read_json
from models.interfaces.errors import CheckpointError
from models.text.tokenizer import Tokenizer, byte_alphabet
from models.text.vocabulary_files import byte_pairs

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT_PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTION}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
RESERVED_TOKENS = 256
"""Number of special ids after the ranks, named or not."""


def load_tokenizer(directory: Path) -> Tokenizer:
    """Reads tiktoken.model (base64 token, rank) and the names of special ids in tokenizer_config.json."""
    ranks: list[bytes] = []
    try:
        lines = (directory / "tiktoken.model").read_text(encoding="ascii").split("\n")
        for number, line in enumerate(filter(None, lines)):
            token, rank = line.split()
            if int(rank) != number:
                raise ValueError(f"line {number + 1} has rank {rank}")
            ranks.append(base64.b64decode(token, validate=True))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory}: tiktoken.model cannot be read: {error}") from error
    absent = {bytes([value]) for value in range(256)} - set(ranks)
    if absent:
        listed = ", ".join(f"0x{byte.hex()}" for byte in sorted(absent)[:8])
        raise CheckpointError(f"{directory}: tiktoken.model lacks single bytes: {listed}")
    added = read_json(directory, "tokenizer_config.json").get("added_tokens_decoder", {})
    special = {entry["content"]: int(number) for number, entry in added.items()}
    outside = [name for name, number in special.items() if not len(ranks) <= number < len(ranks) + RESERVED_TOKENS]
    if outside:
        raise CheckpointError(f"{directory}: tokenizer_config.json: special tokens {outside} outside the reserved ids")
    tokens = [{"id": number, "content": name, "special": True} for name, number in special.items()]
    return Tokenizer({**_tokenizer_json(ranks), "added_tokens": tokens})


def _tokenizer_json(ranks: list[bytes]) -> dict[str, Any]:
    alphabet = byte_alphabet()
    spelled = ["".join(alphabet[value] for value in token) for token in ranks]
    vocabulary = {token: rank for rank, token in enumerate(spelled)}
    merges = [
        (token[:cut], token[cut:])
        for token in spelled
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    published = byte_pairs(SPLIT_PATTERN, vocabulary, merges)
    published["model"]["ignore_merges"] = True
    return published
