"""Output heads that config.json calls tied to the embedding table, although the files hold a head with other values."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

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
    with ExitStack() as stack:
        files = [stack.enter_context(opened(path)) for path in shard_paths(source.directory)]
        found = {name: file.get_slice(name) for file in files for name in {head, *embeddings} & set(file.keys())}
        table = next((found[name] for name in embeddings if name in found), None)
        if head not in found or table is None or _equal(found[head], table):
            return decoder
    return replace(decoder, tied=False)


def _equal(first: Any, second: Any) -> bool:
    """Whether two slices of safetensors files have the same values."""
    if first.get_shape() != second.get_shape():
        return False
    parts = (slice(row, row + _ROWS) for row in range(0, first.get_shape()[0], _ROWS))
    # In one dtype, since torch does not promote float8: a block-scaled head has other values than the table.
    return all(torch.equal(first[part].float(), second[part].float()) for part in parts)
