"""A long text is tokenized beside the event loop, not instead of it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from models.kimi_vl.tokenizer import load_tokenizer as load_kimi
from models.tokenizer import load_tokenizer

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.mark.parametrize("family", ["qwen2_vl", "kimi_vl"])
def test_other_threads_run_meanwhile(family: str) -> None:
    directory = GOLDEN / family
    if family == "kimi_vl":
        encode = load_kimi(directory).encode
    else:
        encode = load_tokenizer(directory).encode_plain
    text = "some words of no weight " * 40_000
    longest, over = 0.0, threading.Event()

    def watch() -> None:
        nonlocal longest
        last = time.monotonic()
        while not over.wait(0.005):
            now = time.monotonic()
            longest, last = max(longest, now - last), now

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.monotonic()
    ids = encode(text)
    seconds = time.monotonic() - began
    over.set()
    watcher.join()
    assert len(ids) > 40_000
    assert longest < max(0.15, seconds / 2), f"{longest:.2f} of {seconds:.2f} s held all others up"
