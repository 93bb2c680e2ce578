"""Kimi's byte-pair tokenizer without remote code: tiktoken.model read into the `tokenizers` library.

tiktoken merges the adjacent pair whose joined token ranks lowest. The same choice follows from a merge list that holds
every split of every token into two known pieces, in order of the token's rank.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from models.checkpoints.published import read_json
from models.interfaces.errors import CheckpointError
from models.text.tokenizer import PromptTokenizer, byte_alphabet

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
_LONGEST_RUN = 25_000
"""Longest run of characters that are all blank or all not blank. Longer runs are cut, as in the published tokenizer."""


class KimiTokenizer(PromptTokenizer):
    """Cuts long pieces of text before the library encodes them. special_ids: the named ones of the reserved ids."""

    def __init__(self, ranks: Sequence[bytes], special_ids: Mapping[str, int]) -> None:
        super().__init__(special_ids)
        self.ranks = ranks
        self.vocab_size = len(ranks) + RESERVED_TOKENS
        self._bpe = _byte_pair_encoder(ranks)

    def decode(self, token_ids: Sequence[int]) -> bytes:
        return b"".join(self.ranks[token] for token in token_ids if token < len(self.ranks))

    def _encoded(self, text: str) -> list[int]:
        # Of this library's calls, only those for batches release the interpreter lock.
        encodings = self._bpe.encode_batch_fast(list(_pieces(text)), add_special_tokens=False)
        return [token for encoding in encodings for token in encoding.ids]


def load_tokenizer(directory: Path) -> KimiTokenizer:
    """Reads tiktoken.model (base64 token, rank) and the names of special ids in tokenizer_config.json."""
    ranks: list[bytes] = []
    try:
        lines = (directory / "tiktoken.model").read_text(encoding="ascii").split("\n")
        for number, line in enumerate(filter(None, lines)):
            token, rank = line.split()
            if int(rank) != number:
                raise ValueError(f"line {number + 1} has rank {rank}")
            ranks.append(base64.b64decode(token, validate=True))
    except (OSError, ValueError, binascii.Error) as error:
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
    return KimiTokenizer(ranks, special)


def _byte_pair_encoder(ranks: Sequence[bytes]) -> Tokenizer:
    alphabet = byte_alphabet()
    spelled = ["".join(alphabet[value] for value in token) for token in ranks]
    vocabulary = {token: rank for rank, token in enumerate(spelled)}
    merges = [
        (token[:cut], token[cut:])
        for token in spelled
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    encoder = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=True))
    encoder.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return encoder


def _pieces(text: str) -> list[str]:
    """The parts of `text`, cut where a run of blanks or of non-blanks exceeds the longest run."""
    pieces, start, run, blank = [], 0, 0, False
    if len(text) <= _LONGEST_RUN:
        return [text] if text else []
    for index, character in enumerate(text):
        run = run + 1 if character.isspace() == blank else 1
        blank = character.isspace()
        if run > _LONGEST_RUN:
            pieces.append(text[start:index])
            start, run = index, 1
    return [*pieces, text[start:]]
