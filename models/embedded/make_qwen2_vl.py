"""Writes models/embedded/qwen2_vl around trained weights: the files of the published format beside them.

The same bytes come out every time:

    python -m models.embedded.make_qwen2_vl build/vision/average.safetensors

The weights come from models/embedded/train_qwen2_vl.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

from safetensors.torch import load_file

from models.embedded.vision_training.checkpoint import publish
from models.embedded.vision_training.network import Shape

DIRECTORY = Path(__file__).parent / "qwen2_vl"


def make(directory: Path, weights: Path) -> None:
    """Writes all files of the checkpoint into `directory`; weights: a safetensors file in the published names."""
    tensors = load_file(weights)
    publish(directory, Shape(vocab_size=len(tensors["model.embed_tokens.weight"])), tensors)


if __name__ == "__main__":
    make(DIRECTORY, Path(sys.argv[1]))
