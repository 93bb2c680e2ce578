"""Random prompts with common beginnings, aborts, preemptions and failed launches: what a launch reads is written by it
or was by an earlier one, and every page and row of recurrent state has the holders that it should. No model runs."""

from __future__ import annotations

from collections import Counter, deque

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from service.engine.chat import states
from service.engine.chat.pacing import ChunkBudget, PrefillCost
from service.engine.chat.scheduler import Scheduler
from service.engine.chat.sequence import ChatSequence, Step
from service.engine.core.pages import PagePool, SlotPool
from service.link.messages import ChatRequest
from service.link.sampling import SamplingParams
from tests.support.slow import slow
from tests.support.tiny_chat import tiny_item, tiny_prompt

PAGE, PAGES, SLOTS, STEP_TOKENS = 4, 24, 5, 40
SIZES = (7, 30, 40)
"""Far apart, so that chunks are often cut to the first."""
MAX_TURNS = 100
"""Launches and reads for each request that is left at the end; alone it takes 30 at most."""


class SchedulerMachine(RuleBasedStateMachine):
    """A scheduler, and of every KV slot the sequence and the position whose key launches wrote there last."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = PagePool(PAGES + 1, PAGE)
        self.scheduler = Scheduler(self.pages, SlotPool(SLOTS))
        self.cost = PrefillCost()
        self.cost.start({size: 1e-3 + 1e-4 * size for size in SIZES}, 1e-7)
        self.written: dict[int, tuple[ChatSequence, int]] = {}
        self.in_flight: deque[Step] = deque()
        self.alive: list[ChatSequence] = []
        self.encoded: set[bytes] = set()
        self.count = 0

    @rule(
        shared=st.sampled_from([0, 7, 8, 9, 16, 21]),
        picture=st.booleans(),
        own=st.integers(0, 2),
        rest=st.sampled_from([1, 4, 11, 30]),
        copies=st.integers(1, 3),
        max_tokens=st.sampled_from([1, 2, 6, 14]),
    )
    def submit(self, shared: int, picture: bool, own: int, rest: int, copies: int, max_tokens: int) -> None:
        prompt = tiny_prompt([list(range(shared)), *([tiny_item(1, [6])] if picture else []), [40 + own] * rest])
        for _ in range(copies):
            request = ChatRequest(
                str(self.count), "m", prompt, SamplingParams(max_tokens=max_tokens), self.count * 1e-4
            )
            sequence = ChatSequence(request, max_tokens, PAGE)
            self.count += 1
            self.alive.append(sequence)
            self.scheduler.add(sequence)

    @rule()
    def encode(self) -> None:
        self.encoded.add(tiny_item(1, [6]).digest)

    @rule(
        tokens=st.sampled_from([3, 10, STEP_TOKENS]),
        seconds=st.sampled_from([1e-3, 2.8e-3, 1.0]),
        fault=st.sampled_from([None, None, None, None, "prefill", "step"]),
        sizes=st.sampled_from([SIZES, ()]),
    )
    def step(self, tokens: int, seconds: float, fault: str | None, sizes: tuple[int, ...]) -> None:
        if len(self.in_flight) == 2:
            self.read()
        self.launch(tokens, seconds, fault, sizes)

    def launch(self, tokens: int, seconds: float, fault: str | None, sizes: tuple[int, ...] = SIZES) -> bool:
        budget = ChunkBudget(tokens, seconds, min_tokens=2, cost=self.cost, sizes=sizes)
        step = self.scheduler.schedule(self.can_start, budget)
        if step is None:
            return False
        assert sum(chunk.length for chunk in step.chunks) == budget.used <= max(tokens, budget.multiple)
        self.write(step)
        if fault is None or (fault == "prefill" and not step.chunks):
            self.check_reads(step)
            self.scheduler.launched(step)
            self.in_flight.append(step)
        else:  # It may have written anything.
            for slot in (slot for chunk in step.chunks for slot in self.slots(chunk.sequence, chunk.start, chunk.end)):
                self.written.pop(slot)
            failed = [chunk.sequence for chunk in step.chunks] + (list(step.sequences) if fault == "step" else [])
            self.spoil(step if fault == "step" else None)
            for sequence in failed:
                self.finish(sequence, failed=True)
        return True

    def spoil(self, step: Step | None) -> None:
        """The decode rows of this step failed, too."""

    def can_start(self, sequence: ChatSequence) -> bool:
        items = sequence.items_from(sequence.hit_pages * PAGE).values()
        return all(item.digest in self.encoded for item in items)

    def slots(self, sequence: ChatSequence, start: int, end: int) -> list[int]:
        return [sequence.pages[position // PAGE] * PAGE + position % PAGE for position in range(start, end)]

    def rows(self, step: Step) -> list[tuple[ChatSequence, int, int]]:
        """Every sequence of the step with the positions whose keys it gets."""
        first = [int(self.scheduler.rows.num_keys[slot]) for slot in step.slots]
        decodes = [(sequence, at, at + 1) for sequence, at in zip(step.sequences, first, strict=True)]
        return [*decodes, *((chunk.sequence, chunk.start, chunk.end) for chunk in step.chunks)]

    def write(self, step: Step) -> None:
        places: set[int] = set()
        for writer, start, end in self.rows(step):
            for position, slot in enumerate(self.slots(writer, start, end), start):
                page = slot // PAGE
                assert slot not in places and self.pages._digests[page] is None
                assert not any(page in s.pages for s in self.scheduler.running.values() if s is not writer)
                places.add(slot)
                self.written[slot] = writer, position

    def check_reads(self, step: Step) -> None:
        for sequence, _, end in self.rows(step):
            self.check_keys(sequence, end)

    def check_keys(self, sequence: ChatSequence, end: int) -> None:
        """The places of these positions have keys of the same tokens and pictures before and at each."""
        for position, slot in enumerate(self.slots(sequence, 0, end)):
            owner, at = self.written[slot]
            assert at == position
            if owner is not sequence:
                assert position < min(owner.num_tokens, sequence.num_tokens)
                np.testing.assert_array_equal(owner.token_ids(0, at + 1), sequence.token_ids(0, at + 1))
                assert list(owner.media_rows(0, at + 1)) == list(sequence.media_rows(0, at + 1))

    @rule()
    def read(self) -> None:
        """As the worker does: tokens become known, and pages of the answer findable."""
        if not self.in_flight:
            return
        for sequence in self.in_flight.popleft().sampled:
            if sequence.finished:
                continue
            if sequence.num_unread:
                sequence.num_unread -= 1
            if self.has_stopped(sequence):
                self.finish(sequence)
                continue
            sequence.generated.append(60)
            num_keys = sequence.num_tokens - 1
            if not num_keys % PAGE and not sequence.num_unread:
                self.scheduler.index(sequence, num_keys)
            if len(sequence.generated) == sequence.max_new_tokens:
                self.finish(sequence)

    def has_stopped(self, sequence: ChatSequence) -> bool:
        """Whether its next token is a stop token."""
        return False

    def finish(self, sequence: ChatSequence, *, failed: bool = False) -> None:
        self.alive.remove(sequence)
        self.scheduler.finish(sequence, failed=failed)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        if self.alive:
            self.finish(data.draw(st.sampled_from(self.alive), label="aborted"))

    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        scheduler = self.scheduler
        held = [s for s in scheduler.running.values() if s.slot in scheduler.rows.members or s in scheduler._prefilling]
        if held:
            scheduler.preempt(data.draw(st.sampled_from(held), label="preempted"))

    @rule(pages=st.integers(1, PAGES))
    def evict(self, pages: int) -> None:
        self.pages.release(self.pages.allocate(min(pages, self.pages.num_available)))

    @invariant()
    def every_page_has_the_holders_that_it_should(self) -> None:
        self.pages.check()
        held = Counter(page for sequence in self.scheduler.running.values() for page in sequence.pages)
        assert {page: count for page, count in enumerate(self.pages._holders) if count} == held
        slots = self.scheduler.slots
        assert len(self.scheduler.running) == slots.num_slots - slots.num_free
        assert {*self.scheduler.waiting, *self.scheduler.running.values()} == set(self.alive)
        assert len(self.scheduler.waiting) + len(self.scheduler.running) == len(self.alive)

    @invariant()
    def what_is_findable_or_held_as_computed_was_launched(self) -> None:
        for digest, page in self.pages._index.items():
            for offset in range(PAGE):
                owner, position = self.written[page * PAGE + offset]
                owner.extend_digests(owner.num_tokens)
                assert position % PAGE == offset and owner.digests[position // PAGE] == digest
        for sequence in self.scheduler._prefilling:
            self.check_keys(sequence, sequence.num_prefilled)

    def teardown(self) -> None:
        self.encode()
        for _ in range(MAX_TURNS * len(self.alive)):
            if not self.alive:
                break
            if len(self.in_flight) == 2 or not self.launch(STEP_TOKENS, 1.0, None):
                self.read()
            self.every_page_has_the_holders_that_it_should()
        assert not self.alive, "some wait for ever"
        assert self.pages.num_used == 0 and self.scheduler.slots.num_free == self.scheduler.slots.num_slots


class StateMachine(SchedulerMachine):
    """With recurrent state, kept every INTERVAL positions: of each row, the sequence whose state it is and after how
    many tokens; and of each slot what the device has: the two rows, the number of keys, and whether it is active."""

    INTERVAL = 8

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(states, "STATE_INTERVAL", self.INTERVAL)
        self.patch.setattr(states, "PROMPT_TAIL", 2)
        self.states = states.StatePool(1 + states.ROWS_EACH * SLOTS + 2, self.pages)
        self.scheduler = Scheduler(self.pages, SlotPool(SLOTS), self.states)
        self.content: dict[int, tuple[ChatSequence, int]] = {}
        self.device: dict[int, tuple[list[int], int, bool]] = {}

    def has_stopped(self, sequence: ChatSequence) -> bool:
        return len(sequence.generated) == 2 + int(sequence.request_id) % 13

    def write(self, step: Step) -> None:
        """A launch that fails may leave anything in the rows that it writes."""
        super().write(step)
        for chunk in step.chunks:
            sequence = chunk.sequence
            rows = {sequence.state_rows[1], sequence.snapshot_row} - {0}
            assert sequence.state_read not in rows and not rows & {*self.states.rows._index.values()}
            assert chunk.start % self.INTERVAL == 0 and (chunk.is_last or chunk.end % self.INTERVAL == 0)
            assert bool(chunk.snapshot_end) == bool(sequence.snapshot_row)
            for row in rows:
                self.content.pop(row, None)

    def spoil(self, step: Step | None) -> None:
        for slot in [] if step is None else step.slots:
            for row in self.device[slot][0]:
                self.content.pop(row, None)

    def check_reads(self, step: Step) -> None:
        super().check_reads(step)
        for chunk in step.chunks:
            sequence = chunk.sequence
            if chunk.start:
                self.check_state(sequence.state_read, sequence, chunk.start)
            else:
                assert not sequence.state_read
            self.content[sequence.state_rows[1]] = sequence, chunk.end
            if chunk.snapshot_end:
                self.content[sequence.snapshot_row] = sequence, chunk.snapshot_end
            if chunk.is_last:
                self.device[sequence.slot] = sequence.state_rows[::-1], chunk.end, not self.has_stopped(sequence)
        for slot, sequence in zip(step.slots, step.sequences, strict=True):
            rows, length, active = self.device[slot]
            if active:
                self.check_state(rows[0], sequence, length)
                rows = rows[::-1] if length % self.INTERVAL == 0 else rows
                self.content[rows[0]] = sequence, length + 1
                sampled = length + 1 - sequence.num_prompt_tokens
                self.device[slot] = rows, length + 1, sampled != 2 + int(sequence.request_id) % 13

    def check_state(self, row: int, sequence: ChatSequence, length: int) -> None:
        owner, end = self.content[row]
        assert end == length
        if owner is not sequence:
            np.testing.assert_array_equal(owner.token_ids(0, end), sequence.token_ids(0, end))
            assert list(owner.media_rows(0, end)) == list(sequence.media_rows(0, end))

    @rule(rows=st.integers(1, 18))
    def evict_snapshots(self, rows: int) -> None:
        pool = self.states.rows
        pool.release(pool.allocate(min(rows, pool.num_available)))

    @invariant()
    def every_row_has_the_holders_that_it_should(self) -> None:
        self.states.rows.check()
        held = Counter(
            row
            for sequence in self.scheduler.running.values()
            for row in {*sequence.state_rows, sequence.state_read, sequence.snapshot_row} - {0}
        )
        assert {row: count for row, count in enumerate(self.states.rows._holders) if count} == held

    @invariant()
    def snapshots_are_of_cached_pages_and_of_their_tokens(self) -> None:
        for digest, row in self.states.rows._index.items():
            owner, end = self.content[row]
            owner.extend_digests(owner.num_tokens)
            assert owner.digests[end // PAGE - 1] == digest and end % self.INTERVAL == 0 and digest in self.pages

    def teardown(self) -> None:
        super().teardown()
        assert self.states.rows.num_used == 0
        self.patch.undo()


@pytest.mark.parametrize("fault", ["step", None])
def test_a_row_of_a_failed_step_leaves_no_snapshot(fault: str | None) -> None:
    """It has passed 8; the step may have written anything to its rows."""
    machine = StateMachine()
    machine.count = 12
    machine.submit(shared=0, picture=False, own=0, rest=4, copies=1, max_tokens=14)
    (sequence,) = machine.alive
    for _ in range(9):
        assert machine.launch(STEP_TOKENS, 1.0, None)
        machine.read()
    assert machine.device[sequence.slot][1:] == (12, True)
    machine.launch(STEP_TOKENS, 1.0, fault)
    machine.read()
    if fault is None:
        machine.finish(sequence)
    assert len(machine.states.rows._index) == (fault is None)
    machine.teardown()


def test_a_row_that_has_stopped_unseen_at_a_boundary_leaves_no_snapshot() -> None:
    """Request 4 stops after 6 tokens: the step that would swap its rows at 16 is launched before that is read."""
    machine = StateMachine()
    machine.count = 4
    machine.submit(shared=9, picture=False, own=0, rest=1, copies=1, max_tokens=14)
    (sequence,) = machine.alive
    for _ in range(8):
        if len(machine.in_flight) == 2:
            machine.read()
        assert machine.launch(STEP_TOKENS, 1.0, None)
    rows, length, active = machine.device[sequence.slot]
    assert (length, active, sequence.num_tokens) == (16, False, 16)
    assert machine.scheduler.rows.num_keys[sequence.slot] == 17 and len(rows) == 2
    machine.scheduler.preempt(sequence)
    machine.snapshots_are_of_cached_pages_and_of_their_tokens()
    assert {machine.content[row][1] for row in machine.states.rows._index.values()} == {8}
    machine.teardown()


@pytest.mark.parametrize(
    ("machine", "examples"),
    [(SchedulerMachine, 12), (StateMachine, 20), slow(SchedulerMachine, 120), slow(StateMachine, 120)],
)
def test_any_schedule(machine: type[SchedulerMachine], examples: int) -> None:
    each = {"max_examples": examples, "stateful_step_count": 40, "suppress_health_check": list(HealthCheck)}
    run_state_machine_as_test(machine, settings=settings(deadline=None, **each))
