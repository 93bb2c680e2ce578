"""A long text is tokenized beside the event loop, not instead of it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest

from models.kimi_vl.tokenizer import load_tokenizer as load_kimi
from models.tokenizer import load_tokenizer
from tests.support.golden import GOLDEN


@pytest.mark.parametrize("family", ["qwen2_vl", "kimi_vl"])
def test_other_threads_run_meanwhile(family: str) -> None:
    directory = GOLDEN / family
    if family == "kimi_vl":
        encode = load_kimi(directory).encode
    else:
        encode = load_tokenizer(directory).encode_plain
    text = "some words of no weight " * 40_000
    # A busy machine may keep the other thread waiting once; a call that lets nobody run does it every time.
    assert any(longest_pause(lambda: encode(text)) < 0.5 for _ in range(5))


def longest_pause(encode: Callable[[], list[int]]) -> float:
    """The longest time that another thread had no turn, as a share of the time that the text took."""
    pauses, over = [0.0], threading.Event()

    def take_turns() -> None:
        last = time.monotonic()
        while not over.wait(0.001):
            now = time.monotonic()
            pauses.append(now - last)
            last = now

    watcher = threading.Thread(target=take_turns)
    watcher.start()
    began = time.monotonic()
    count = len(encode())
    seconds = time.monotonic() - began
    over.set()
    watcher.join()
    assert count > 40_000
    return max(pauses) / seconds
