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
VOCABULARY = 151_936
"""Rows of its embedding where that is to have the published size."""
PIXELS = {"min_pixels": 3136, "max_pixels": 12_845_056}
"""Published limits of a picture."""


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


def miniature_directory(parent: Path) -> Path:
    """The miniature Qwen2-VL with a tokenizer and limits of published size."""
    directory = parent / TINY_MODEL
    left_out = shutil.ignore_patterns("*.safetensors", "vocab.json", "merges.txt")
    shutil.copytree(GOLDEN / TINY_MODEL, directory, ignore=left_out)
    grow_file(directory / "tokenizer.json", PUBLISHED, WORDS)
    for name, values in (("config.json", {"vocab_size": VOCABULARY}), ("preprocessor_config.json", PIXELS)):
        path = directory / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return directory
