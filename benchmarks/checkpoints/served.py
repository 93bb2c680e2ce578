"""Checkpoint directories without weights, for servers under load: the tokenizers have far more entries than the
miniatures of tests/golden."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from benchmarks.checkpoints.published import GOLDEN, make
from benchmarks.checkpoints.tokenizers import PUBLISHED, grow_file
from service.cli.bench.traffic import WORDS

TINY_MODEL = "qwen2_vl"
"""The miniature; its directory has this name, too."""
TINY_ENTRIES = 4_096
"""Entries of its tokenizer where that is to be small."""


def served_directory(model: str, parent: Path) -> Path:
    """Configuration and tokenizer of a published size, without weights; of a miniature for TINY_MODEL."""
    if model != TINY_MODEL:
        directory = make(model, parent)
        grow_file(directory / "tokenizer.json", PUBLISHED, WORDS)
        for other in ("vocab.json", "merges.txt"):  # the miniature's, which some readers would take first
            (directory / other).unlink(missing_ok=True)
        return directory
    directory = parent / model
    shutil.copytree(GOLDEN / model, directory, ignore=shutil.ignore_patterns("*.safetensors"))
    grow_file(directory / "tokenizer.json", TINY_ENTRIES, WORDS)
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"vocab_size": TINY_ENTRIES}, indent=2))
    return directory
