"""Tokenizers of published size: a miniature tokenizer.json grown to 151,643 entries, about 10 MB."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import chain, islice, product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

PUBLISHED = 151_643
"""Entries of Qwen2's vocabulary, special tokens apart."""
SPACE = "\u0120"
"""How a byte-level vocabulary writes a space."""


def grow(published: dict[str, Any], size: int = PUBLISHED) -> dict[str, Any]:
    """A byte-level BPE tokenizer.json with merges of two characters, then of four, up to `size` ids. Ids and special
    tokens that were there stay."""
    model = published["model"]
    vocab: dict[str, int] = dict(model["vocab"])
    merges = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    letters = [token for token in vocab if len(token) == 1]
    pairs = list(islice(product(letters, letters), 40_000))
    joined = [a + b for a, b in pairs]
    first = 1 + max([*vocab.values(), *(token["id"] for token in published["added_tokens"])])
    ids = iter(range(first, size))
    for left, right in chain(pairs, product(joined, joined)):
        if left + right not in vocab:
            identifier = next(ids, None)
            if identifier is None:
                break
            vocab[left + right] = identifier
            merges.append((left, right))
    return _with(published, vocab, merges)


def grow_words(published: dict[str, Any], words: Sequence[str], size: int = PUBLISHED) -> dict[str, Any]:
    """A byte-level BPE tokenizer.json in which each of `words` behind a space is one token, and so are, up to `size`
    ids, other strings of up to four letters behind a space. Ids and special tokens that were there stay.

    A word is merged from its beginning on, before anything else, so that what random weights write, read again as text,
    is nearly always the tokens that they wrote: a conversation's next prompt then begins with what is cached.
    """
    model = published["model"]
    # Readers number an added token anew unless the vocabulary has it.
    vocab: dict[str, int] = model["vocab"] | {token["content"]: token["id"] for token in published["added_tokens"]}
    ids = iter(range(1 + max(vocab.values()), size))
    merges: dict[tuple[str, str], None] = {}
    named = (token for word in words for token in _beginnings(SPACE + word))
    others = (
        SPACE + "".join(letters) for length in (1, 2, 3, 4) for letters in product(ascii_lowercase, repeat=length)
    )
    for token in chain(named, others):
        if token not in vocab:
            identifier = next(ids, None)
            if identifier is None:
                break
            vocab[token] = identifier
        merges.setdefault((token[:-1], token[-1]))
    known = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in model["merges"]]
    return _with(published, vocab, list(dict.fromkeys([*merges, *known])))


def _beginnings(token: str) -> Iterator[str]:
    return (token[:length] for length in range(2, len(token) + 1))


def _with(published: dict[str, Any], vocab: dict[str, int], merges: Sequence[tuple[str, ...]]) -> dict[str, Any]:
    return {**published, "model": {**published["model"], "vocab": vocab, "merges": [" ".join(pair) for pair in merges]}}


def grow_file(path: Path, size: int = PUBLISHED, words: Sequence[str] = ()) -> None:
    """Replaces a tokenizer.json by the grown one; with words by `grow_words`."""
    published = json.loads(path.read_text("utf-8"))
    grown = grow_words(published, words, size) if words else grow(published, size)
    path.write_text(json.dumps(grown, ensure_ascii=False), "utf-8")
