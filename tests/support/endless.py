"""Answers that do not end before a test does, however fast the machine."""

from __future__ import annotations

import json
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "golden/qwen2_vl"
ENDLESS_TOKENS = 1 << 18
"""Of one answer. At the 0.3 ms that a step costs on the host alone they last longer than a test may; keys of all of
them would take 200 MB, of which a test touches what it gets to."""
FLAGS = ("--kv-cache-tokens", str(ENDLESS_TOKENS), "--request-timeout", "3600")


def endless_checkpoint(target: Path) -> Path:
    """Qwen2-VL's miniature under its own name in `target`, with a context that holds ENDLESS_TOKENS."""
    copy = target / SOURCE.name
    copy.mkdir()
    for file in SOURCE.iterdir():
        if file.name not in ("images", "expected.safetensors", "config.json"):
            (copy / file.name).symlink_to(file)
    config = json.loads((SOURCE / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": ENDLESS_TOKENS}))
    return copy
