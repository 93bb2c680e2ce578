"""The Qwen3-VL miniature as a reranker: its vocabulary has "yes" and "no"."""

from __future__ import annotations

import json
from pathlib import Path

from tests.support.processes import ROOT

GOLDEN = ROOT / "tests/golden/qwen3_vl"
WORDS = {"yes": ("y", "es"), "no": ("n", "o")}


def write_reranker(directory: Path) -> None:
    """Write the checkpoint: that of the golden directory, in whose vocabulary WORDS take the place of the last
    merged tokens."""
    directory.mkdir()
    for path in GOLDEN.iterdir():
        if path.name not in ("tokenizer.json", "vocab.json", "merges.txt"):
            (directory / path.name).symlink_to(path)
    published = json.loads((GOLDEN / "tokenizer.json").read_text())
    model = published["model"]
    kept = sorted(model["vocab"].items(), key=lambda entry: entry[1])[: -len(WORDS)]
    ids = {word: len(kept) + place for place, word in enumerate(WORDS)}
    merges = [*model["merges"][: -len(WORDS)], *([*pair] for pair in WORDS.values())]
    merges = [merge if isinstance(merge, list) else merge.split(" ") for merge in merges]
    published["model"] = {**model, "vocab": {**dict(kept), **ids}, "merges": merges}
    (directory / "tokenizer.json").write_text(json.dumps(published))
