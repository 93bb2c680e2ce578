"""Writes a few held-out pictures of every promised gate with their questions and answers, for tests that have no fonts.

REPRISE_WORLD_FONTS=build/fonts python -m models.embedded.world.sample tests/golden/world --number 4
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import numpy as np
from PIL import Image

from models.embedded import gates_qwen2_vl as gates


def write(directory: Path, number: int) -> None:
    """questions.json and a file of every picture; the frames of a video lie side by side in one."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    entries = []
    for name in (name for name in gates.NAMES if name not in gates.NOT_PROMISED):
        for index, example in enumerate(gates.examples(name, number)):
            media = []
            for nth, picture in enumerate(example.pictures):
                file = f"{name}_{index}_{nth}.webp"
                Image.fromarray(np.concatenate(picture.frames, axis=1)).save(directory / file, quality=92, method=6)
                media.append({"file": file, "frames": len(picture.frames)})
            turns = [[turn.question, turn.answer] for turn in example.conversations[0]]
            entries.append({"gate": name, "media": media, "turns": turns})
    text = ",\n ".join(json.dumps(entry, ensure_ascii=False) for entry in entries)
    (directory / "questions.json").write_text(f"[{text}]\n", encoding="utf-8")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--number", type=int, default=4, help="questions of each gate")
    options = parser.parse_args()
    write(options.directory, options.number)
