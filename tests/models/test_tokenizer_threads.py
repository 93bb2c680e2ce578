"""A long text is tokenized beside the event loop, not instead of it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from models.kimi_vl.tokenizer import load_tokenizer as load_kimi
from models.text.tokenizer import load_tokenizer
from tests.support.golden import GOLDEN

TURNS = 4
"""Of the other thread. It has one before the call and one behind it at most where the call lets nobody run."""


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_vl", "kimi_vl"])
def test_other_threads_run_meanwhile(family: str) -> None:
    directory = GOLDEN / family
    if family == "kimi_vl":
        encode = load_kimi(directory).encode
    else:
        encode = load_tokenizer(directory).encode_plain
    text = "some words of no weight " * 40_000
    # A busy machine may let the other thread wait once; a call that lets nobody run does it every time.
    assert any(turns_meanwhile(lambda: encode(text)) >= TURNS for _ in range(5))


def turns_meanwhile(encode: Callable[[], list[int]]) -> int:
    """How often another thread had its turn while the text was being tokenized."""
    began, over, turns = threading.Event(), threading.Event(), [0]

    def take_turns() -> None:
        began.set()
        while not over.wait(0.001):
            turns[0] += 1

    watcher = threading.Thread(target=take_turns)
    watcher.start()
    began.wait()
    before = turns[0]
    count = len(encode())
    meanwhile = turns[0] - before
    over.set()
    watcher.join()
    assert count > 40_000
    return meanwhile
