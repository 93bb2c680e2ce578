"""Masks from tokens that nobody has read yet to the device, and what the engine's thread does meanwhile."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from models.qwen_vl.processor import load_processor
from service.api.structured.grammar import MAX_GRAMMAR_BYTES, choice_grammar, regex_grammar
from service.engine.chat.guided import guidance as guidance_module
from service.engine.chat.guided.guidance import (
    Guidance,
    MaskJob,
    MaskProcess,
    MaskTable,
    MaskThread,
    SharedMasks,
    Unread,
    hosts_of,
)
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
    build_tokenizer,
)
from service.engine.chat.sequence import Guide
from service.engine.chat.slot_state import SlotState
from service.engine.core.readback import Readback
from service.hub import EMBEDDED
from service.link.config import EngineConfig, ModelConfig
from service.link.messages import ChatRequest
from service.link.sampling import SamplingParams
from service.system.children import Silence
from tests.support.devices import DEVICES
from tests.support.grammars import with_all_servers
from tests.support.inference import no_gradients as no_gradients
from tests.support.inline_engine import InlineEngine
from tests.support.processes import stand_still
from tests.support.slow import slow
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


def finished(job: MaskJob) -> MaskJob:
    while not job.done:
        job.wait()
    return job


def computed(guidance: Guidance, *sequences: Sequence) -> tuple[list[int], dict[int, str]]:
    """Places of their masks, verdicts."""
    job = finished(guidance.masks(sequences, [[] for _ in sequences]))
    return job.rows.tolist(), job.verdicts


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
    assert finished(job).count == 3 and not job.verdicts
    places = [1, 0, 2, 3, 0] if servers == 1 else [1, 0, 3, 2, 0]
    assert job.rows.tolist() == places
    table.writable()
    with table.sent(np.array([3, 1, 5, 2, 4]), job.rows, job.count):
        allowed = state.allowed.cpu().numpy()
        assert state.sampled.tolist() == [[3, 1, 5, 2, 4, 0], [*places, 0]]
    assert [following(allowed[place]) for place in places if place] == ["v", "e", "fn"]
    assert (allowed[0] == -1).all() and (allowed[4:] == -1).all(), "rows without a mask allow everything"
    assert [row.guide.num_consumed for row in rows if row.guide is not None] == [2, 1, 1]


def test_a_row_that_has_ended_has_no_mask_and_no_verdict(masks: np.ndarray, guidance: Guidance) -> None:
    before = results(("y", 1), ("n", 0), ("y", 0))
    stopped, goes_on, aborted = guided(guidance, "yes"), guided(guidance, "no never"), guided(guidance, "yes")
    rows = [stopped, goes_on, aborted]
    built(guidance, *rows)
    job = guidance.masks(rows, [[(before, 0)], [(before, 1)], [(before, 2)]])
    assert aborted.guide is not None and stopped.guide is not None
    guidance.forget(aborted.guide)
    assert finished(job).rows.tolist() == [0, 1, 0] and not job.verdicts
    assert following(masks[0]) == "eo"
    assert stopped.guide.num_consumed == 0, "its matcher was left alone"


def test_verdicts_say_which_rows_do_not_go_on(guidance: Guidance) -> None:
    before = results(("o", 0), ("n", 0), ("x", 0))
    bad = Sequence(guidance.begin('{"grammars": [{"lark_grammar": "start: missing"}]}'))
    rows = [bad, guided(guidance, "no", "n"), guided(guidance, "no never"), guided(guidance, "no never")]
    built(guidance, *rows)
    job = finished(guidance.masks(rows, [[], [(before, 0)], [(before, 1)], [(before, 2)]]))
    assert set(job.verdicts) == {0, 1, 3} and job.verdicts[1] == COMPLETE
    assert "cannot be built" in job.verdicts[0]
    assert job.rows.tolist() == [0, 1, 2, 3]


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
def test_a_server_that_is_busy_with_one_thing_for_too_long_is_given_up(mortal: bool) -> None:
    """With the vocabulary, or with the first matcher that it was asked for and has not answered, whatever the other
    thread builds meanwhile. A server in the engine's process cannot be ended."""
    host, clock = Silent(mortal=mortal), [0.0]
    guidance = Guidance([host])
    (server,) = guidance._servers
    server._silence = Silence(lambda: clock[0])
    slow, next_slow = guidance.begin("a", slow=True), guidance.begin("b", slow=True)
    look_for(guidance, clock, 59)
    host.say(Ready())
    guidance.receive(GENEROUS)
    look_for(guidance, clock, 59)
    host.say(Built(slow.number, ""))
    guidance.receive(GENEROUS)
    look_for(guidance, clock, 59)
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
    assert computed(guidance, lost, kept)[1] == {0: BROKEN}
    assert computed(guidance, lost, kept) == ([0, 1], {0: BROKEN}), "nothing is asked of one that has ended"
    assert lost.guide is not None
    guidance.forget(lost.guide)
    other = guided(guidance, "on of")
    built(guidance, other)
    assert not computed(guidance, other)[1] and following(masks[0]) == "o"


def ask(engine: InlineEngine, name: str, **fields: Any) -> None:
    fields = {"max_tokens": 40, "stop_token_ids": (END_TOKEN,), "temperature": 1.0, **fields}
    engine.submit(name, tiny_prompt([[1, 2, 3]]), **fields)


@pytest.mark.parametrize("keeps", [slow(False), True], ids=["as on a CPU", "as on a GPU"])
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

    def reading(launch: Any, now: float) -> None:
        read(launch, now)
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


def test_a_mask_server_that_failed_is_no_fault_of_the_client() -> None:
    worker = InlineEngine(graphs=False).worker
    for name, verdict in (("one", BROKEN), ("two", "no token can follow")):
        worker.submit(ChatRequest(name, "tiny", tiny_prompt([[1]]), SamplingParams(max_tokens=1), 0.0))
        worker._requests.end_guided(worker._requests._sequences[name], verdict)
    failed = worker.collect().failed
    assert [(one.status, one.code) for one in failed] == [(503, "engine_error"), (400, "grammar_failed")]
    assert failed[0].retry_after and not failed[1].retry_after


DIRECTORY = EMBEDDED / "qwen2_vl"
PROCESSOR = load_processor(DIRECTORY)
WIDTH = -(-PROCESSOR.vocab_size // 32)
CONFIG = EngineConfig(models=(ModelConfig("sees", str(DIRECTORY)),), max_running=3)

on_linux = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="processes share masks on Linux alone")


@pytest.fixture
def shared() -> SharedMasks:
    return SharedMasks(3, WIDTH)


@pytest.fixture
def processes(shared: SharedMasks) -> Iterator[list[MaskProcess]]:
    yield [MaskProcess(str(DIRECTORY), PROCESSOR.vocab_size, shared, CONFIG) for _ in range(2)]


def allowed(masks: np.ndarray, text: str) -> bool:
    """Whether a mask allows the first token of a text."""
    token = PROCESSOR.tokenize(text)[0]
    return bool(masks[token // 32] >> (token % 32) & 1)


@on_linux
@pytest.mark.parametrize("end", ["killed", slow("computes for ever")])
def test_a_process_that_ends_or_hangs_is_started_anew(
    shared: SharedMasks, processes: list[MaskProcess], monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    guidance = Guidance([processes[0]])
    lost = guided(guidance, "zebra")
    built(guidance, lost)
    process = processes[0]._process
    assert process is not None
    with monkeypatch.context() as patch:
        if end == "killed":
            process.kill()
            process.wait()
        else:
            stand_still(process.pid)
            patch.setattr(guidance_module, "_LONGEST_COMPUTATION", 0.0)
        assert computed(guidance, lost)[1] == {0: BROKEN}
    assert process.poll() == -signal.SIGKILL
    other = guided(guidance, "violin")
    built(guidance, other)
    assert computed(guidance, other) == ([1], {}) and allowed(shared.masks[0], "v")


@on_linux
def test_processes_are_for_gpus_and_for_models_with_a_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def hosts(name: str, device: str, processors: int, sharers: int = 1) -> list[type]:
        monkeypatch.setattr("models.interfaces.cpus.available", lambda: processors)
        config = EngineConfig(models=CONFIG.models, sharers=sharers)
        masks, found = hosts_of(name, PROCESSOR, PROCESSOR.vocab_size, config, device)
        assert masks.shape == (config.slots, WIDTH) and not masks.any()
        return [type(host) for host in found]

    assert hosts("sees", "cpu", 64) == hosts("other", "cuda", 64) == [MaskThread]
    assert hosts("sees", "cuda", 64) == [MaskProcess] * 4
    assert hosts("sees", "cuda", 64, sharers=8) == [MaskProcess] * 2
    assert hosts("sees", "cuda", 2) == [MaskProcess]
