"""Masks from tokens that nobody has read yet to the device, and what the engine's thread does meanwhile."""

from __future__ import annotations

import select
import threading
from dataclasses import dataclass, field
from itertools import count
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from service.api.structured.grammar import choice_grammar, regex_grammar
from service.engine.chat.guide import Guide
from service.engine.chat.guided.guidance import Guidance
from service.engine.chat.guided.mask_hosts import MaskThread
from service.engine.chat.guided.mask_server import (
    BROKEN,
    COMPLETE,
    Build,
    Built,
    Forget,
    MaskRequest,
    MaskServer,
    Ready,
    Reply,
)
from service.engine.chat.guided.mask_table import MaskTable
from service.engine.chat.guided.masks import Unread
from service.engine.chat.guided.matchers import build_matcher, build_tokenizer
from service.engine.chat.slot_state import SlotState
from service.engine.core.readback import Readback
from service.link.grammar_limits import MAX_GRAMMAR_BYTES
from service.link.silence import Silence
from tests.support.devices import DEVICES
from tests.support.grammars import with_all_servers
from tests.support.inference import no_gradients as no_gradients
from tests.support.inline_engine import InlineEngine
from tests.support.tiny_chat import ALPHABET, END_TOKEN, VOCABULARY, tiny_processor, tiny_prompt
from tests.support.waiting import GENEROUS, wait

ROWS = 5
WORDS = -(-VOCABULARY // 32)


@pytest.fixture(autouse=True)
def shared_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers share rows however few there are."""
    monkeypatch.setattr("service.engine.chat.guided.guidance._FEW", 1)


@dataclass(eq=False)
class Sequence:
    """The part of a ChatSequence that Guidance.masks reads."""

    guide: Guide | None = None
    generated: list[int] = field(default_factory=list)


@pytest.fixture
def masks() -> np.ndarray:
    return np.zeros((ROWS, WORDS), np.int32)


@pytest.fixture
def guidance(masks: np.ndarray) -> Guidance:
    return Guidance(threads(masks))


def threads(masks: np.ndarray, number: int = 1) -> list[MaskThread]:
    return [MaskThread(lambda: build_tokenizer(tiny_processor(), VOCABULARY), masks) for _ in range(number)]


def guided(guidance: Guidance, words: str, generated: str = "") -> Sequence:
    """Whose answer is one of these."""
    return Sequence(guidance.begin(choice_grammar(words.split())), ids(generated))


def built(guidance: Guidance, *sequences: Sequence) -> None:
    def all_built() -> bool:
        guidance.take_built()
        return all(sequence.guide is None or sequence.guide.built for sequence in sequences)

    wait(all_built, what="matchers")


def ids(text: str) -> list[int]:
    return [ALPHABET.index(character) for character in text]


def results(*rows: tuple[str, int], device: str = "cpu") -> Readback:
    """Of a launch: a character and whether it stopped its row."""
    values = torch.tensor([(ids(text)[0], stopped) for text, stopped in rows], dtype=torch.int32, device=device)
    return Readback({"results": values}, torch.device(device))


def following(words: np.ndarray) -> str:
    """What a mask int32 [words] allows."""
    bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), bitorder="little")[:VOCABULARY]
    return "".join(ALPHABET[token] if token < END_TOKEN else "." for token in np.flatnonzero(bits))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("servers", [1, 2])
def test_masks_are_those_behind_tokens_that_nobody_has_read(device: str, servers: int, masks: np.ndarray) -> None:
    guidance = with_all_servers(Guidance(threads(masks, servers)))
    state = SlotState(ROWS, 1, VOCABULARY, torch.device(device))
    table = MaskTable(state, masks)
    state.sampled.fill_(9)  # Of a longer step before.
    first, second = results(("n", 0), ("y", 0), ("o", 0), device=device), results(("e", 0), device=device)
    rows = [
        guided(guidance, "no never"),
        Sequence(),
        guided(guidance, "yes yet"),
        guided(guidance, "on of", "o"),
        Sequence(),
    ]
    built(guidance, *rows)
    unread: list[Unread] = [[(first, 0), (second, 0)], [(first, 0)], [(first, 1)], [], []]
    job = guidance.masks(rows, unread)
    assert job.awaited == [first, second]
    while not job.done:
        job.wait()
    assert job.count == 3 and not job.verdicts
    places = [1, 0, 2, 3, 0] if servers == 1 else [1, 0, 3, 2, 0]
    assert job.rows.tolist() == places
    table.writable()
    with table.sent(np.array([3, 1, 5, 2, 4]), job.rows, job.count):
        allowed = state.allowed.cpu().numpy()
        assert state.sampled.tolist() == [[3, 1, 5, 2, 4, 0], [*places, 0]]
    assert [following(allowed[place]) for place in places if place] == ["v", "e", "fn"]
    assert (allowed[0] == -1).all() and (allowed[4:] == -1).all(), "rows without a mask allow everything"
    assert [row.guide.num_consumed for row in rows if row.guide is not None] == [2, 1, 1]


def test_memory_that_cannot_be_pinned_fails_no_launch(masks: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA keeps the error, and the next launch reports it as its own."""
    errors = [801]  # cudaErrorNotSupported
    runtime = SimpleNamespace(cudaHostRegister=lambda address, size, flags: errors[0])

    class Allowed:
        """The device's table: a launch on it takes the error that is there."""

        def __getitem__(self, row: int) -> Allowed:
            assert row == 0
            return self

        def fill_(self, value: int) -> None:
            assert value == -1, "row 0 allows everything"
            if errors:
                raise torch.AcceleratorError(f"CUDA error {errors.pop()}")

    table = MaskTable(SlotState(ROWS, 1, VOCABULARY, torch.device("cpu")), masks)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(table, "_allowed", Allowed())
    table._pin()
    assert not errors


def test_a_row_that_has_ended_has_no_mask_and_no_verdict(masks: np.ndarray, guidance: Guidance) -> None:
    before = results(("y", 1), ("n", 0), ("y", 0))
    stopped, goes_on, aborted = guided(guidance, "yes"), guided(guidance, "no never"), guided(guidance, "yes")
    rows = [stopped, goes_on, aborted]
    built(guidance, *rows)
    job = guidance.masks(rows, [[(before, 0)], [(before, 1)], [(before, 2)]])
    assert aborted.guide is not None and stopped.guide is not None
    guidance.forget(aborted.guide)
    while not job.done:
        job.wait()
    assert job.rows.tolist() == [0, 1, 0] and not job.verdicts
    assert following(masks[0]) == "eo"
    assert stopped.guide.num_consumed == 0, "its matcher was left alone"


def test_verdicts_say_which_rows_do_not_go_on(guidance: Guidance) -> None:
    before = results(("o", 0), ("n", 0), ("x", 0))
    bad = Sequence(guidance.begin('{"grammars": [{"lark_grammar": "start: missing"}]}'))
    rows = [bad, guided(guidance, "no", "n"), guided(guidance, "no never"), guided(guidance, "no never")]
    built(guidance, *rows)
    job = guidance.masks(rows, [[], [(before, 0)], [(before, 1)], [(before, 2)]])
    while not job.done:
        job.wait()
    assert set(job.verdicts) == {0, 1, 3} and job.verdicts[1] == COMPLETE
    assert "cannot be built" in job.verdicts[0]
    assert job.rows.tolist() == [0, 1, 2, 3]


def test_what_comes_while_a_server_reads_the_vocabulary_goes_to_those_that_have(masks: np.ndarray) -> None:
    reads = threading.Event()

    def slowly() -> Any:
        assert reads.wait(GENEROUS)
        return build_tokenizer(tiny_processor(), VOCABULARY)

    guidance = Guidance([*threads(masks), MaskThread(slowly, masks)])
    guidance.start()
    assert [server.link is not None for server in guidance._servers] == [True, False], "it may not be needed"
    wait(lambda: (guidance.receive(0.05), guidance._servers[0].ready)[1], what="the first one")
    early = [guided(guidance, "no never") for _ in range(3)]
    built(guidance, *early)
    reads.set()
    with_all_servers(guidance)
    late = [guided(guidance, "yes yet") for _ in range(3)]
    assert [row.guide.server for row in (*early, *late) if row.guide is not None] == [0, 0, 0, 1, 1, 1]
    built(guidance, *late)


def test_few_rows_are_left_to_few_servers(masks: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each server that takes part in a step costs time."""
    monkeypatch.undo()
    guidance = with_all_servers(Guidance(threads(masks, 3)))
    rows = [guided(guidance, "no never") for _ in range(15)]
    servers = [row.guide.server for row in rows if row.guide is not None]
    assert servers == [0] * 4 + [1] * 4 + [2] * 4 + [0, 1, 2], "then they share"
    for row in rows[1:4]:
        assert row.guide is not None
        guidance.forget(row.guide)
    (again,) = [guided(guidance, "no never")]
    assert again.guide is not None and again.guide.server == 0
    built(guidance, *rows[4:], again)


def test_a_vocabulary_that_cannot_be_read_fails_its_guides(masks: np.ndarray) -> None:
    def unreadable() -> Any:
        raise ValueError("a token is not text")

    guidance = Guidance([MaskThread(unreadable, masks)])
    row = guided(guidance, "no never")
    built(guidance, row)
    assert row.guide is not None and "cannot be built" in row.guide.problem and not guidance.building


class Silent:
    """A host whose server reads nothing until it is told to."""

    own_interpreter = False

    def __init__(self, *, mortal: bool = False) -> None:
        self.mortal = mortal

    def start(self) -> Connection:
        ours, self.theirs = Pipe()
        return ours

    def kill(self) -> bool:
        return self.mortal

    def say(self, reply: Reply) -> None:
        self.theirs.send_bytes(msgspec.msgpack.encode(reply))

    def read(self) -> list[MaskRequest]:
        read = []
        while self.theirs.poll():
            read.append(msgspec.msgpack.decode(self.theirs.recv_bytes(), type=MaskRequest))
        return read


def test_a_server_that_does_not_read_stops_nobody() -> None:
    host = Silent()
    guidance, grammar = Guidance([host]), " " * MAX_GRAMMAR_BYTES
    rows = [Sequence() for _ in range(40)]
    for row in rows:
        row.guide = guidance.begin(grammar)
    assert host.read() == [], "it is starting"
    guides = [row.guide for row in rows if row.guide is not None]
    for guide in guides[2:]:
        guidance.forget(guide)
    host.say(Ready())
    guidance.receive(GENEROUS)
    more = [guidance.begin(grammar) for _ in range(8)]  # It has read the vocabulary, and hangs: nothing fits any more.
    for guide in more:
        guidance.forget(guide)
    received: list[MaskRequest] = []
    while len(received) < 2:
        received += host.read()
        guidance.receive(0.0)
    received += host.read()
    assert received == [Build(guide.number, grammar, slow=False) for guide in guides[:2]], "the others are not needed"
    guidance.forget(guides[0])
    assert host.read() == [Forget(guides[0].number)]


def look_for(guidance: Guidance, clock: list[float], seconds: float) -> None:
    """Lets time pass in which the engine looks for replies often, and none comes."""
    for _ in range(round(2 * seconds)):
        clock[0] += 0.5
        guidance.receive(0.0)


@pytest.mark.parametrize("mortal", [False, True])
def test_a_server_that_builds_one_matcher_for_too_long_is_given_up(mortal: bool) -> None:
    """It is the first of those that it was asked for and has not answered, whatever the other thread builds meanwhile.
    A server in the engine's process cannot be ended."""
    host, clock = Silent(mortal=mortal), [0.0]
    guidance = Guidance([host])
    (server,) = guidance._servers
    server._silence = Silence(lambda: clock[0])
    slow, next_slow = guidance.begin("a", slow=True), guidance.begin("b", slow=True)
    look_for(guidance, clock, 200)
    assert not slow.built, "it reads the vocabulary"
    host.say(Ready())
    guidance.receive(GENEROUS)
    look_for(guidance, clock, 29)
    host.say(Built(slow.number, ""))
    guidance.receive(GENEROUS)
    look_for(guidance, clock, 29)
    assert slow.built and not next_slow.built, "each has its own time"
    quick = guidance.begin("c")
    host.say(Built(quick.number, ""))
    guidance.receive(GENEROUS)
    clock[0] += 1000.0  # the engine itself was paused
    guidance.receive(0.0)
    assert quick.built and not next_slow.built
    guidance.forget(next_slow)
    last = guidance.begin("d", slow=True)
    look_for(guidance, clock, 2)
    if mortal:
        assert last.built and [guide.problem for guide in (slow, quick, last)] == [BROKEN] * 3
        assert not guidance.building and server.link is None
    else:
        assert not last.built


def test_a_server_that_never_reads_the_vocabulary_is_given_up() -> None:
    clock = [0.0]
    guidance = Guidance([Silent(mortal=True)])
    guidance._servers[0]._silence = Silence(lambda: clock[0])
    guide = guidance.begin("a")
    look_for(guidance, clock, 301)
    assert guide.built and guide.problem == BROKEN and not guidance.building


def test_a_matcher_that_is_not_needed_any_more_is_answered_without_being_built(
    masks: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that what is unanswered is what the server still has to do."""
    may_build, build = threading.Event(), MaskServer._build
    monkeypatch.setattr(MaskServer, "_build", lambda server, grammar: may_build.wait() and build(server, grammar))
    guidance = Guidance(threads(masks))
    first, second = guided(guidance, "no never"), guided(guidance, "yes yet")
    assert first.guide is not None and second.guide is not None
    (server,) = guidance._servers
    wait(lambda: (guidance.receive(0.0), len(server._unanswered) == 2)[1], what="both requests")
    guidance.forget(second.guide)
    wait(lambda: (guidance.receive(0.0), list(server._unanswered))[1] == [first.guide.number], what="one answer")
    may_build.set()
    built(guidance, first)
    assert not first.guide.problem and not second.guide.built


class Watched:
    """A poll that has nothing the first two times that it does not wait. waits: milliseconds that it was to wait."""

    def __init__(self, poll: select.poll) -> None:
        self._poll = poll
        self.register, self.unregister = poll.register, poll.unregister
        self.waits: list[int] = []

    def poll(self, milliseconds: int) -> list[tuple[int, int]]:
        self.waits.append(milliseconds)
        return self._poll.poll(1e3 * GENEROUS) if milliseconds or len(self.waits) > 2 else []


@pytest.mark.parametrize("own_interpreter", [False, True])
def test_masks_of_a_process_are_looked_for_before_the_engine_sleeps(
    own_interpreter: bool, masks: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waking takes time. A server in a thread needs the interpreter lock, so it is awaited asleep."""
    monkeypatch.setattr("service.engine.chat.guided.guidance._SPIN", GENEROUS)
    hosts = threads(masks)
    monkeypatch.setattr(hosts[0], "own_interpreter", own_interpreter)
    guidance = Guidance(hosts)
    row = guided(guidance, "no never")
    built(guidance, row)
    job = guidance.masks([row], [[]])
    (server,) = guidance._servers
    guidance._poll = server._poll = watched = Watched(guidance._poll)  # type: ignore[assignment]
    guidance.receive(GENEROUS)
    assert job.done and following(masks[0]) == "n"
    slept = [wait for wait in watched.waits if wait]
    assert slept == ([] if own_interpreter else [1e3 * GENEROUS])


def test_looking_for_masks_is_part_of_the_wait_for_them(masks: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine's other models launch nothing meanwhile."""
    clock = count(0.0, 0.125)
    monkeypatch.setattr("service.engine.chat.guided.guidance._SPIN", 0.5)
    monkeypatch.setattr("service.engine.chat.guided.guidance.time", SimpleNamespace(monotonic=lambda: next(clock)))
    hosts = threads(masks)
    monkeypatch.setattr(hosts[0], "own_interpreter", True)
    guidance = Guidance(hosts)
    waits: list[int] = []

    def nothing(milliseconds: int) -> list[tuple[int, int]]:
        waits.append(milliseconds)
        return []

    monkeypatch.setattr(guidance, "_poll", SimpleNamespace(poll=nothing))
    guidance.receive(2.0)
    assert waits == [0, 0, 0, 0, 1500]


def ended(*_: object) -> dict[int, str]:
    raise SystemExit


def test_a_server_that_ends_fails_its_guides_and_another_one_begins(
    masks: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    first, second = threads(masks, 2)
    guidance = with_all_servers(Guidance([first, second]))
    lost, kept = guided(guidance, "no never"), guided(guidance, "yes yet")
    built(guidance, lost, kept)
    monkeypatch.setattr(first.server, "_compute", ended)
    job = guidance.masks([lost, kept], [[], []])
    while not job.done:
        job.wait()
    assert job.verdicts == {0: BROKEN}
    again = guidance.masks([lost, kept], [[], []])
    while not again.done:
        again.wait()
    assert again.verdicts == {0: BROKEN} and again.rows.tolist() == [0, 1], "nothing is asked of one that has ended"
    assert lost.guide is not None
    guidance.forget(lost.guide)
    other = guided(guidance, "on of")
    built(guidance, other)
    job = guidance.masks([other], [[]])
    while not job.done:
        job.wait()
    assert not job.verdicts and following(masks[0]) == "o"


def test_a_matcher_that_is_being_built_when_its_server_ends_fails(
    masks: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    guidance = Guidance(threads(masks))
    monkeypatch.setattr(MaskServer, "_submit", ended)
    lost = guided(guidance, "no never")
    built(guidance, lost)
    assert lost.guide is not None and lost.guide.problem == BROKEN and not guidance.building


def test_a_server_that_cannot_be_started_anew_fails_its_guide_alone(
    masks: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused() -> None:
        raise OSError("too many processes")

    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    (host,) = threads(masks)
    guidance = Guidance([host])
    lost = guided(guidance, "no never")
    built(guidance, lost)
    monkeypatch.setattr(host.server, "_compute", ended)
    job = guidance.masks([lost], [[]])
    while not job.done:
        job.wait()
    with monkeypatch.context() as patch:
        patch.setattr(host, "start", refused)
        refusal = guided(guidance, "yes yet")
        assert refusal.guide is not None and (refusal.guide.built, refusal.guide.problem) == (True, BROKEN)
        assert guidance.take_built() == [refusal.guide] and not guidance.building
    other = guided(guidance, "on of")
    built(guidance, other)
    assert other.guide is not None and not other.guide.problem


def ask(engine: InlineEngine, name: str, **fields: Any) -> None:
    fields = {"max_tokens": 40, "stop_token_ids": (END_TOKEN,), "temperature": 1.0, **fields}
    engine.submit(name, tiny_prompt([[1, 2, 3]]), **fields)


@pytest.mark.parametrize("keeps", [False, True], ids=["as on a CPU", "as on a GPU"])
def test_tokens_are_read_and_sent_while_the_masks_behind_them_are_computed(
    keeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = InlineEngine()
    engine.worker._outbox._keeps = keeps
    goes_on = threading.Event()
    compute, computed = MaskServer._compute, list[int]()
    read, was_read = engine.worker._read_tokens, list[int]()

    def held_back(server: MaskServer, first: int, rows: list[tuple[int, list[int]]]) -> dict[int, str]:
        computed.append(len(rows))
        if len(computed) > 1:
            assert goes_on.wait(GENEROUS)
        return compute(server, first, rows)

    def reading(launch: Any) -> None:
        read(launch)
        was_read.append(launch.rows)

    monkeypatch.setattr(MaskServer, "_compute", held_back)
    monkeypatch.setattr(engine.worker, "_read_tokens", reading)
    ask(engine, "guided", grammar=regex_grammar("[a-z]{12}"), seed=3)

    def first_is_read() -> bool:
        engine.turn()
        return bool(was_read)

    wait(first_is_read, what="a token before masks that do not come")
    assert len(engine.tokens("guided")) == 1, "sent by the turn that read it"
    held = engine.worker._in_flight.held
    assert held is not None and held.masks is not None and not held.masks.done
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
