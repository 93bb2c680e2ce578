"""Checkpoint directories for servers under load."""

from __future__ import annotations

from pathlib import Path

from benchmarks.checkpoints.served import TINY_ENTRIES, TINY_MODEL, served_directory
from models.checkpoints.registry import family_of, resolve


def test_the_miniature_is_a_checkpoint_without_weights(tmp_path: Path) -> None:
    directory = served_directory(TINY_MODEL, tmp_path)
    processor = resolve(family_of(directory).processor)(directory)
    assert processor.vocab_size == TINY_ENTRIES and not list(directory.glob("*.safetensors"))
