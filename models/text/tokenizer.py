"""tokenizer.json through the `tokenizers` library (transformers' wrapper would import torch).

Special tokens are found by string. Text is cut at them and each piece is encoded on its own, without special tokens,
so a caller decides which literals in a text are special: the ones that hold no `escape` character.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from models.checkpoints.published import read_json, read_optional_json
from models.interfaces.errors import CheckpointError
from models.text.recent_texts import RecentTexts
from models.text.vocabulary_files import tokenizer_of_vocabulary

# The library hands the texts of a batch to threads of its own, even a single one: to wake a thread and to wait for it
# takes as long as to tokenize a sentence.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


def byte_alphabet() -> list[str]:
    """The alphabet of byte-level tokenizers, as GPT-2's published encoder.py makes it: a printable character for each
    of the 256 bytes, its Latin-1 character or the next one from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(value if value in printable else next(others)) for value in range(256)]


class Tokenizer:
    """Text to ids and ids to bytes. vocab_size: one more than the largest id.

    special_ids: added tokens by string, found in text where no `escape` character stands in them.
    """

    def __init__(self, published: dict[str, Any], *, spoken: frozenset[str] = frozenset()) -> None:
        """published: the parsed tokenizer.json. spoken: special tokens that decode keeps as text.

        Raises CheckpointError for a tokenizer.json that cannot be read.
        """
        # Programs that train leave their truncation and padding in the file; transformers does not apply them either.
        published = {**published, "truncation": None, "padding": None}
        added = published.get("added_tokens", [])
        _check_supported(published)
        self.special_ids: Mapping[str, int] = {token["content"]: token["id"] for token in added}
        literals = sorted(map(re.escape, self.special_ids), key=len, reverse=True)
        self._literal = re.compile("|".join(literals)) if literals else re.compile(r"(?!)")
        self._silent = {token["id"] for token in added if token["special"] and token["content"] not in spoken}
        self._plain = fast_tokenizer({**published, "added_tokens": [], "post_processor": None})
        self.vocab_size = 1 + max([*self._plain.get_vocab().values(), *self.special_ids.values()])
        self._opening = _opening_ids(published)
        self._names = {token["id"]: token["content"] for token in added}
        self._byte_values: dict[str, int] | None = None
        if _is_byte_level(published.get("decoder") or {}):
            self._byte_values = {character: value for value, character in enumerate(byte_alphabet())}
        self._bytes = cache(self._bytes_of)
        self._recent = RecentTexts(self._encoded)

    def encode_plain(self, text: str) -> list[int]:
        """Ids of `text`; literal special tokens in it are plain text."""
        return self._recent.ids(text) if text else []

    def escape(self, text: str, escape: str) -> str:
        """`text` with the character `escape` inserted into each literal special token."""
        return self._literal.sub(lambda match: match[0][:1] + escape + match[0][1:], text)

    def encode(self, text: str, escape: str) -> list[int]:
        """Ids of a whole prompt, with one opening token: special tokens where they stand, escaped ones as plain
        text."""
        ids: list[int] = []
        end = 0
        for match in self._literal.finditer(text):
            ids += self.encode_plain(text[end : match.start()].replace(escape, ""))
            ids.append(self.special_ids[match[0]])
            end = match.end()
        ids += self.encode_plain(text[end:].replace(escape, ""))
        return ids if ids[: len(self._opening)] == self._opening else [*self._opening, *ids]

    def decode(self, token_ids: Sequence[int]) -> bytes:
        """Bytes of the ids, those of special tokens that are not `spoken` left out. The ids may be split anywhere: the
        bytes of the parts join."""
        return b"".join(map(self._bytes, token_ids))

    def _encoded(self, text: str) -> list[int]:
        # Of this library's calls, only those for batches release the interpreter lock.
        ids: list[int] = self._plain.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return ids

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._silent:
            return b""
        if token_id in self._names:
            return self._names[token_id].encode()
        token = self._plain.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_values is not None:
            return bytes(self._byte_values[character] for character in token)
        byte = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace("▁", " ").encode()


def load_tokenizer(directory: Path, *, spoken: frozenset[str] = frozenset()) -> Tokenizer:
    """Reads tokenizer.json, or the files that may take its place, and added tokens of tokenizer_config.json. spoken: as
    Tokenizer takes it. Raises CheckpointError if one of them cannot be read."""
    whole = (directory / "tokenizer.json").exists()
    published = read_json(directory, "tokenizer.json") if whole else tokenizer_of_vocabulary(directory)
    listed = read_optional_json(directory, "tokenizer_config.json").get("added_tokens_decoder") or {}
    return Tokenizer({**published, "added_tokens": _added_tokens(published, listed)}, spoken=spoken)


def _added_tokens(published: dict[str, Any], listed: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Added tokens of tokenizer.json, and those that tokenizer_config.json lists by id: as in transformers, these need
    not be in tokenizer.json, and their flags take precedence."""
    tokens: dict[str, dict[str, Any]] = {token["content"]: token for token in published.get("added_tokens", [])}
    for token_id, token in listed.items():
        known = tokens.get(token["content"], {"id": int(token_id), "special": False})
        tokens[token["content"]] = {**known, **token}
    return list(tokens.values())


def fast_tokenizer(published: Mapping[str, Any]) -> FastTokenizer:
    """The library's tokenizer of a parsed tokenizer.json. Raises CheckpointError if the library cannot read it."""
    try:
        return FastTokenizer.from_str(json.dumps(published))
    except Exception as error:  # The library raises no narrower class.
        raise CheckpointError(f"tokenizer.json cannot be read: {error}") from error


def _check_supported(published: dict[str, Any]) -> None:
    """Raises CheckpointError for what depends on the text around a piece, since pieces are encoded on their own."""
    for token in published.get("added_tokens", []):
        for flag in ("single_word", "lstrip", "rstrip"):
            if token.get(flag):
                raise CheckpointError(f"tokenizer.json: {flag} of added token {token['content']!r} is not supported")
    before = published.get("pre_tokenizer") or {}
    if any(step.get("prepend_scheme") == "first" for step in (before, *before.get("pretokenizers", []))):
        raise CheckpointError("tokenizer.json: prepend_scheme 'first' of a Metaspace pre-tokenizer is not supported")


def _opening_ids(published: dict[str, Any]) -> list[int]:
    """What the post-processor puts before every text. What it puts behind a text, an end, is for training: an answer
    begins there. Without a post-processor that could, a second reading of a large file is spared."""
    processor = published.get("post_processor")
    if processor is None or processor.get("type") == "ByteLevel":
        return []
    tokenizer = fast_tokenizer(published)
    text = list(tokenizer.encode("a", add_special_tokens=False).ids)
    ids = list(tokenizer.encode("a").ids)
    start = next(start for start in range(len(ids)) if ids[start : start + len(text)] == text)
    return ids[:start]


def _is_byte_level(decoder: dict[str, Any]) -> bool:
    kinds = [decoder.get("type"), *(part.get("type") for part in decoder.get("decoders", []))]
    if "ByteLevel" in kinds:
        return True
    if "ByteFallback" in kinds:
        return False
    raise CheckpointError(f"tokenizer.json: decoder of types {kinds}; expected ByteLevel or ByteFallback")
