"""Random arrivals, aborts, preemptions and failed prefills: every answer is the one that the request gets alone, and
nothing leaks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)

from models.interfaces.media import Prompt
from service.engine.chat import drafts
from service.engine.chat.drafts import DraftLength
from service.link.config import Drafts
from tests.support.inline_engine import InlineEngine
from tests.support.out_of_memory import OutOfMemory
from tests.support.recurrent_chat import recurrent_model
from tests.support.slow import slow
from tests.support.tiny_chat import TinyChat, tiny_item, tiny_model, tiny_prompt

SHARED_TEXT = tuple(range(3, 15)) * 12
SAMPLING: dict[str, dict[str, object]] = {
    "greedy": {},
    "seeded": {"temperature": 1.3, "seed": 2**63 + 11},
    "filtered": {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "seed": 4, "logprobs": 2},
    "two_tokens": {"temperature": 1.0, "seed": 8, "logit_bias": {5: 50.0, 30: 50.0}},  # ... of which many are accepted.
    "penalised": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "logit_bias": {5: 3.0}, "min_tokens": 3},
}


Kind = Literal["attention", "recurrent"]


@dataclass(frozen=True)
class Ask:
    """A request by value, so that its answer alone can be looked up."""

    shared: int
    own: int
    item: int | None
    sampling: str
    max_tokens: int
    stop: int | None

    def prompt(self) -> Prompt:
        media = [] if self.item is None else [tiny_item(self.item, [4 + 2 * self.item, 6])]
        return tiny_prompt([SHARED_TEXT[: self.shared], *media, [20 + self.own] * (1 + self.own)])

    def params(self) -> dict[str, object]:
        stop = () if self.stop is None else (self.stop, self.stop + 1, self.stop + 2)
        return {**SAMPLING[self.sampling], "max_tokens": self.max_tokens, "stop_token_ids": stop}


def asks(*shared: int) -> st.SearchStrategy[Ask]:
    """Requests that begin with so many tokens of SHARED_TEXT."""
    return st.builds(
        Ask,
        shared=st.sampled_from(shared),
        own=st.integers(0, 8),
        item=st.none() | st.integers(0, 3),
        sampling=st.sampled_from(sorted(SAMPLING)),
        max_tokens=st.integers(1, 14),
        stop=st.none() | st.sampled_from([30, 40, 60]),
    )


ASKS = st.runner().flatmap(lambda machine: machine.asks)


@cache
def model(kind: Kind) -> TinyChat:
    return tiny_model() if kind == "attention" else recurrent_model()


@cache
def alone(kind: Kind, ask: Ask) -> tuple[tuple[int, ...], str | None]:
    """Tokens and finish reason from an engine without captured graphs, prefix hits, batch-mates or launches ahead."""
    engine = InlineEngine(model(kind), graphs=False, page_size=16, overlapped=False)
    engine.submit("alone", ask.prompt(), **ask.params())
    engine.run()
    return tuple(engine.tokens("alone")), engine.finish_reason("alone")


@dataclass
class Sent:
    name: str
    ask: Ask
    aborted: bool = field(default=False)


class EngineMachine(RuleBasedStateMachine):
    kind: Kind = "attention"
    asks = asks(1, 8, 12)
    sizes: Mapping[str, Any] = {"num_pages": 16, "max_step_tokens": 12}
    drafts: Drafts = "off"
    requests = Bundle("requests")

    def __init__(self) -> None:
        super().__init__()
        self.mode = torch.inference_mode()
        self.mode.__enter__()
        self.engine = InlineEngine(
            model(self.kind), max_running=3, encoder_cache=4096, drafts=self.drafts, **self.sizes
        )
        self.sent: list[Sent] = []
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(drafts, "NGRAM", 1)  # So that most rows have drafts, ...
        self.patch.setattr(DraftLength, "choose", lambda self, rows, costs: self._most if rows else 0)
        backbone = self.engine.worker._runner, "_backbone"
        self.faults = OutOfMemory(self.patch, *backbone, times=0)

    @rule(target=requests, ask=ASKS)
    def submit(self, ask: Ask) -> Sent:
        return self.send(ask)

    @rule(target=requests, ask=ASKS, count=st.integers(2, 4))
    def submit_copies(self, ask: Ask, count: int) -> Any:
        """As `n` does."""
        return multiple(*(self.send(ask) for _ in range(count)))

    @rule(times=st.integers(1, 2))
    def run_out_of_memory(self, times: int) -> None:
        """Once: the prefill has a second try. Twice: its requests fail."""
        self.faults._left = times

    def send(self, ask: Ask) -> Sent:
        sent = Sent(f"r{len(self.sent)}", ask)
        self.sent.append(sent)
        self.engine.submit(sent.name, ask.prompt(), **ask.params())
        return sent

    @rule(count=st.integers(1, 6))
    def turns(self, count: int) -> None:
        for _ in range(count):
            self.engine.turn()

    @rule(sent=consumes(requests))
    def abort(self, sent: Sent) -> None:
        sent.aborted = True
        self.engine.abort(sent.name)

    @rule()
    def preempt_newest(self) -> None:
        scheduler = self.engine.worker._scheduler
        candidates = [s for s in scheduler.running.values() if s.slot in scheduler.rows.members]
        if candidates:
            scheduler.preempt(candidates[-1])

    @invariant()
    def pages_are_in_one_state_each(self) -> None:
        self.engine.worker._pages.check()
        held = [page for s in self.engine.worker._scheduler.running.values() for page in s.pages]
        assert len(set(held)) == self.engine.worker._pages.num_used

    def teardown(self) -> None:
        try:
            self.engine.run()
            self.engine.assert_nothing_left()
            failures = self.engine.failures()
            assert not failures or self.faults.failed > 1
            assert {failed.code for failed in failures.values()} <= {"out_of_memory"}
            eager = {kind for kind, route, _ in self.engine.steps() if route == "eager"}
            assert "prefill" not in eager, "chunks of at most a bucket's tokens are replayed"
            for sent in self.sent:
                tokens, reason = alone(self.kind, sent.ask)
                got = tuple(self.engine.tokens(sent.name))
                if sent.aborted or sent.name in failures:
                    assert got == tokens[: len(got)]
                else:
                    assert (got, self.engine.finish_reason(sent.name)) == (tokens, reason)
        finally:
            self.patch.undo()
            self.mode.__exit__(None, None, None)


class RecurrentEngineMachine(EngineMachine):
    """With recurrent state: prompts that reach past a boundary or two."""

    kind = "recurrent"
    asks = asks(30, 60, 70, 120, 135)
    sizes: Mapping[str, Any] = {"num_pages": 80, "max_step_tokens": 64}

    @invariant()
    def rows_of_state_are_in_one_state_each(self) -> None:
        scheduler = self.engine.worker._scheduler
        assert scheduler.states is not None
        scheduler.states.rows.check()
        held = {row for s in scheduler.running.values() for row in (*s.state_rows, s.state_read, s.snapshot_row)}
        assert len(held - {0}) == scheduler.states.rows.num_used


class DraftingMachine(EngineMachine):
    drafts = "lookup"


class RecurrentDraftingMachine(RecurrentEngineMachine):
    drafts = "lookup"


MACHINES = {EngineMachine: 4, RecurrentEngineMachine: 2, DraftingMachine: 2, RecurrentDraftingMachine: 2}
"""Examples in `make test`."""


@pytest.mark.parametrize(("machine", "examples"), [*MACHINES.items(), *(slow(machine, 30) for machine in MACHINES)])
def test_any_schedule(machine: type[EngineMachine], examples: int) -> None:
    each = {"max_examples": examples, "stateful_step_count": 20, "suppress_health_check": list(HealthCheck)}
    run_state_machine_as_test(machine, settings=settings(deadline=None, **each))
