"""Masks from tokens that nobody has read yet to the device, and what the engine's thread does meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import llguidance
import numpy as np
import pytest
import torch

from service.api.chat.grammar import choice_grammar, regex_grammar
from service.engine.chat import masks
from service.engine.chat.guidance import build_matcher, build_tokenizer
from service.engine.chat.masks import GOES_ON, MaskJob, MaskTable, Wanted
from service.engine.chat.slot_state import SlotState
from service.engine.readback import Readback
from tests.support.devices import DEVICES
from tests.support.inline_engine import InlineEngine
from tests.support.tiny_chat import ALPHABET, END_TOKEN, VOCABULARY, tiny_processor, tiny_prompt
from tests.support.waiting import GENEROUS, wait

TOKENIZER = build_tokenizer(tiny_processor(), VOCABULARY)
SLOTS = 5


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


@dataclass
class RowGuide:
    matcher: llguidance.LLMatcher | None
    num_consumed: int = 0


def guide(words: str) -> RowGuide:
    return RowGuide(build_matcher(TOKENIZER, choice_grammar(words.split())))


def ids(text: str) -> list[int]:
    return [ALPHABET.index(character) for character in text]


def results(*rows: tuple[str, int], device: str = "cpu") -> Readback:
    """Of a launch: a character and whether it stopped its row."""
    values = torch.tensor([(ids(text)[0], stopped) for text, stopped in rows], dtype=torch.int32, device=device)
    return Readback({"results": values}, torch.device(device))


def table(device: str = "cpu") -> tuple[SlotState, MaskTable]:
    state = SlotState(SLOTS, 1, VOCABULARY, torch.device(device))
    return state, MaskTable(state.allowed)


def following(words: np.ndarray) -> str:
    """What a mask int32 [words] allows."""
    bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), bitorder="little")[:VOCABULARY]
    return "".join(ALPHABET[token] if token < END_TOKEN else "." for token in np.flatnonzero(bits))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("parallel", [False, True])
def test_masks_are_those_behind_tokens_that_nobody_has_read(
    device: str, parallel: bool, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(masks, "_MANY_ROWS", 2)
    state, rows = table(device)
    first, second = results(("n", 0), ("y", 0), ("o", 0), device=device), results(("e", 0), device=device)
    guides = [guide("no never"), guide("yes yet"), guide("on of")]
    wanted = {
        0: Wanted(guides[0], [], [(first, 0), (second, 0)]),
        2: Wanted(guides[1], [], [(first, 1)]),
        3: Wanted(guides[2], ids("o"), []),
    }
    job = MaskJob(wanted, 5, rows, threads, llguidance.LLExecutor(2) if parallel else None)
    threads.submit(int).result(GENEROUS)
    assert job.done() and set(job.verdicts.values()) == {GOES_ON}
    assert job.rows.tolist() == [1, 0, 2, 3, 0]
    assert job.awaited == [first, second]
    with rows.reading():
        allowed = state.allowed.cpu().numpy()
    assert [following(allowed[place]) for place in (1, 2, 3)] == ["v", "e", "fn"]
    assert (allowed[0] == -1).all() and (allowed[4:] == -1).all(), "rows without a mask allow everything"
    assert [one.num_consumed for one in guides] == [2, 1, 1]


def test_a_row_that_its_stop_token_ended_has_no_mask_and_no_verdict(threads: ThreadPoolExecutor) -> None:
    state, rows = table()
    before = results(("y", 1), ("n", 0))
    stopped = guide("yes yet")
    job = MaskJob(
        {0: Wanted(stopped, [], [(before, 0)]), 1: Wanted(guide("no never"), [], [(before, 1)])}, 2, rows, threads, None
    )
    threads.submit(int).result(GENEROUS)
    assert job.done() and job.rows.tolist() == [0, 1]
    assert job.verdicts == {1: GOES_ON}
    assert following(state.allowed[1].numpy()) == "eo"
    assert stopped.matcher is not None and stopped.matcher.consume_tokens(ids("yes")), "its matcher was left alone"


def test_a_matcher_that_could_not_be_built_bars_nothing_and_says_so(threads: ThreadPoolExecutor) -> None:
    _, rows = table()
    job = MaskJob({1: Wanted(RowGuide(None), [], [])}, 3, rows, threads, None)
    threads.submit(int).result(GENEROUS)
    assert job.done() and not job.rows.any()
    assert "cannot be built" in job.verdicts[1]


class Withheld(Readback):
    """Results that arrive when a test says so."""

    def __init__(self) -> None:
        super().__init__({"results": torch.tensor([(ids("y")[0], 0)], dtype=torch.int32)}, torch.device("cpu"))
        self.asked, self.arrive = threading.Event(), threading.Event()

    def fetch(self) -> dict[str, np.ndarray]:
        self.asked.set()
        assert self.arrive.wait(GENEROUS)
        return super().fetch()


def test_masks_are_late_by_when_their_tokens_came(threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long a step runs: the engine's thread waits for it in short turns and takes commands in between."""
    monkeypatch.setattr(masks, "_LATE", 0.0)
    _, rows = table()
    before = Withheld()
    goes_on = threading.Event()
    send = rows.send

    def held_back(count: int) -> None:
        assert goes_on.wait(GENEROUS)
        send(count)

    monkeypatch.setattr(rows, "send", held_back)
    job = MaskJob({0: Wanted(guide("yes yet"), [], [(before, 0)])}, 1, rows, threads, None)
    assert before.asked.wait(GENEROUS)
    assert not job.late
    job.wait()
    assert not job.done() and not job.late
    before.arrive.set()
    while not job.late:
        job.wait()
    assert not job.done()
    goes_on.set()
    job.wait()
    assert job.done() and job.seconds > 0.0


def ask(engine: InlineEngine, name: str, **fields: Any) -> None:
    fields = {"max_tokens": 40, "stop_token_ids": (END_TOKEN,), "temperature": 1.0, **fields}
    engine.submit(name, tiny_prompt([[1, 2, 3]]), **fields)


def test_sampling_is_launched_before_the_tokens_of_the_step_before_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "_LATE", GENEROUS)
    engine = InlineEngine()
    worker: Any = engine.worker
    happened: list[str] = []
    sample, launch, read = worker._runner.sample, worker._runner.launch, worker._read_tokens

    def noting(what: str, call: Any) -> Any:
        def noted(*arguments: Any) -> Any:
            happened.append(what)
            return call(*arguments)

        return noted

    worker._runner.sample, worker._runner.launch = noting("sample", sample), noting("layers", launch)
    worker._read_tokens = noting("read", read)
    ask(engine, "guided", grammar=regex_grammar("[a-z]{12}"), seed=3)
    ask(engine, "free", max_tokens=12, seed=4)
    engine.run()
    steady = happened[happened.index("read") :]
    first = steady.index("layers")
    assert steady[first : first + 9] == ["layers", "sample", "read"] * 3
    assert len(engine.tokens("guided")) == 12
    engine.assert_nothing_left()


def test_tokens_before_late_masks_are_read_and_sent_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "_LATE", 0.0)
    engine = InlineEngine()
    engine.worker._outbox._keeps = True  # As on a GPU.
    goes_on = threading.Event()
    send, sent = engine.worker._runner.masks.send, list[int]()

    def held_back(count: int) -> None:
        sent.append(count)
        if len(sent) > 1:
            assert goes_on.wait(GENEROUS)
        send(count)

    monkeypatch.setattr(engine.worker._runner.masks, "send", held_back)
    ask(engine, "guided", grammar=regex_grammar("[a-z]{12}"), seed=3)

    def answered() -> bool:
        engine.turn()
        return bool(engine.tokens("guided"))

    wait(answered, what="a token before masks that do not come")
    held = engine.worker._in_flight.held
    assert held is not None and held.masks is not None and not held.masks.done()
    goes_on.set()
    engine.run()
    assert len(engine.tokens("guided")) == 12
    engine.assert_nothing_left()


def test_tokens_of_a_text_that_a_grammar_forces_are_asked_for_once() -> None:
    """Asking takes the interpreter lock in the midst of a mask."""
    processor = tiny_processor()
    texts: list[str] = []
    tokenize = processor.tokenize
    processor.tokenize = lambda text: texts.append(text) or tokenize(text)
    tokenizer = build_tokenizer(processor, VOCABULARY)  # type: ignore[arg-type]
    matcher = build_matcher(tokenizer, choice_grammar(["forced", "for ever"]))
    for _ in range(2):
        copy = matcher.deep_copy()
        for token in ids("forced"):
            copy.compute_bitmask()
            assert copy.consume_token(token)
    assert texts and len(set(texts)) == len(texts)
