"""The Qwen3-VL miniature as a reranker: its vocabulary has "yes" and "no"."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from service.hub.catalog import load_catalog
from service.link.engine_link import ENTRY
from service.settings.settings import load_settings
from tests.support.processes import ROOT
from tests.support.servers import RunningServer, running_server

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


@contextmanager
def running_reranker(folder: Path) -> Iterator[RunningServer]:
    """Serve it as `tiny`. folder: where its checkpoint is written."""
    directory = folder / "Qwen3-VL-Reranker-tiny"
    write_reranker(directory)
    flags: dict[str, Any] = {"model": (str(directory),), "device": "cpu", "kv_cache_tokens": 4096}
    flags["served_model_name"] = ("tiny",)
    with running_server(load_catalog(load_settings(flags)), engine=ENTRY, **flags) as running:
        yield running
