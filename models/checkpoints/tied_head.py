"""Output heads that config.json calls tied to the embedding table, although the files hold a head with other values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from models.checkpoints.checkpoint import Source
from models.checkpoints.weight_files import opened, shard_paths
from models.layers.decoder import DecoderConfig

_ROWS = 4096
"""Rows of the two tensors that are compared at a time."""


def with_the_files_head(
    decoder: DecoderConfig,
    source: Source,
    *,
    head: str = "lm_head.weight",
    embeddings: Sequence[str] = ("model.embed_tokens.weight", "model.language_model.embed_tokens.weight"),
) -> DecoderConfig:
    """`decoder`, untied if the files hold a head that differs from the embedding table: like transformers 5, this
    trusts the files more than tie_word_embeddings. If no values are read (load_format "random", device meta), it stays
    as it is. embeddings: the names that the table may have."""
    if not decoder.tied or source.load_format == "random" or source.device.type == "meta":
        return decoder
    places = _files_of(source.directory, (head, *embeddings))
    table = next((name for name in embeddings if name in places), None)
    if head not in places or table is None or _equal(places[head], head, places[table], table):
        return decoder
    return replace(decoder, tied=False)


def _files_of(directory: Path, names: Sequence[str]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in shard_paths(directory):
        with opened(path) as file:
            found |= dict.fromkeys(set(names) & set(file.keys()), path)
    return found


def _equal(first_path: Path, first_name: str, second_path: Path, second_name: str) -> bool:
    with opened(first_path) as first_file, opened(second_path) as second_file:
        first, second = first_file.get_slice(first_name), second_file.get_slice(second_name)
        if first.get_shape() != second.get_shape():
            return False
        parts = (slice(row, row + _ROWS) for row in range(0, first.get_shape()[0], _ROWS))
        # In one dtype, since torch does not promote float8: a block-scaled head has other values than the table.
        return all(torch.equal(first[part].float(), second[part].float()) for part in parts)
