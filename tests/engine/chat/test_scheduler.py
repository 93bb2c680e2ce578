"""Who is admitted, in which order, and what is kept free for those who run."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from models.interfaces.media import Prompt
from service.engine.chat.pacing import ChunkBudget, PrefillCost
from service.engine.chat.scheduler import Scheduler
from service.engine.chat.sequence import ChatSequence, Step
from service.engine.core.pages import PagePool, SlotPool
from service.link.messages import ChatRequest
from service.link.sampling import BOUNDS, SamplingParams
from tests.support.tiny_chat import tiny_item, tiny_prompt

PAGE = 4


def scheduler(num_pages: int) -> Scheduler:
    """Over `num_pages` pages that can be used."""
    return Scheduler(PagePool(num_pages + 1, PAGE), SlotPool(8))


def sequence(name: str, token: int, length: int, *, arrival: float = 0.0, max_tokens: int = 100) -> ChatSequence:
    prompt = tiny_prompt([[token] * length])
    return ChatSequence(
        ChatRequest(name, "m", prompt, SamplingParams(max_tokens=max_tokens), arrival), max_tokens, PAGE
    )


def launch(made: Scheduler) -> Step | None:
    """One step, and what the engine does after it."""
    step = made.schedule(lambda sequence: True, ChunkBudget(4096))
    if step is not None:
        made.launched(step)
    return step


def running(made: Scheduler) -> list[str]:
    return [sequence.request.request_id for sequence in made.running.values()]


def test_an_admission_leaves_a_page_for_each_decode_row() -> None:
    """Two decode rows hold four pages of eight. A newcomer may take two more, not three: it would be preempted as soon
    as either row needs its next page."""
    for length, admitted in ((2 * PAGE - 1, True), (2 * PAGE, False)):
        made = scheduler(8)
        for name, token in (("a", 1), ("b", 2)):
            made.add(sequence(name, token, PAGE + 1))
        launch(made)
        assert running(made) == ["a", "b"] and made.pages.num_used == 4
        made.add(sequence("new", 3, length))
        launch(made)
        assert ("new" in running(made)) == admitted
        assert made.pages.num_available >= len(made.rows.members) - ("new" in running(made))
        assert made.num_preemptions == 0


def test_a_prompt_that_is_cached_goes_before_a_shorter_one_that_is_not() -> None:
    """What is computed counts, not what is long."""
    made = scheduler(64)
    first = sequence("first", 1, 8 * PAGE + 1, max_tokens=1)
    made.add(first)
    launch(made)
    made.index(first, 8 * PAGE)
    made.finish(first)
    made.add(sequence("short", 2, 4 * PAGE))
    made.add(sequence("cached", 1, 8 * PAGE + 2))
    step = launch(made)
    assert step is not None
    assert [chunk.sequence.request.request_id for chunk in step.chunks] == ["cached", "short"]
    assert [chunk.length for chunk in step.chunks] == [2, 4 * PAGE]


def test_short_prompts_pass_long_ones_that_have_not_waited_for_long() -> None:
    """Four long prompts at once and a short one every fifth step, at a second a step of 100 tokens, which is what the
    cost of prefills says: a short one waits for less than a long one takes, and every long one ends."""
    made, cost = scheduler(4000), PrefillCost()
    cost.start({100: 1.0}, 1e-12)
    for number in range(4):
        made.add(sequence(f"long {number}", number + 1, 1200, max_tokens=1))
    waits: dict[str, float] = {}
    for second in range(80):
        if second % 5 == 0 and second < 50:
            made.add(sequence(f"short {second}", 50 + second, 10, arrival=float(second), max_tokens=1))
        step = made.schedule(lambda sequence: True, ChunkBudget(100, cost=cost))
        if step is None:
            continue
        made.launched(step)
        for chunk in step.chunks:
            if chunk.is_last:
                waits[chunk.sequence.request.request_id] = second - chunk.sequence.request.arrival
                made.finish(chunk.sequence)
    assert max(wait for name, wait in waits.items() if name.startswith("short")) <= 6
    assert max(waits.values()) <= 50 and len(waits) == 14


def lengths(step: Step | None) -> dict[str, int]:
    assert step is not None
    return {chunk.sequence.request.request_id: chunk.length for chunk in step.chunks}


def test_prompts_that_begin_alike_wait_for_the_step_that_fills_their_pages() -> None:
    """Whole pages that are next, and never the last token of a prompt."""
    made = scheduler(64)
    for name, token, length in (("first", 1, 4 * PAGE), ("same", 1, 4 * PAGE), ("long", 1, 6 * PAGE), ("other", 2, 9)):
        made.add(sequence(name, token, length))
    assert lengths(launch(made)) == {"first": 4 * PAGE, "other": 9}
    assert lengths(launch(made)) == {"same": PAGE, "long": 2 * PAGE}
    first, same, _, long = sorted(made.running.values(), key=lambda s: "first same other long".index(s.request_id))
    assert first.pages[:3] == same.pages[:3] and first.pages[:4] == long.pages[:4] and first.pages[3] != same.pages[3]
    for one in (first, long, same):
        made.finish(one)
        made.pages.check()
    made.add(sequence("later", 1, 6 * PAGE + 1))
    assert lengths(launch(made)) == {"later": 1}, "also what those have computed that shared"


def made_sequence(prompt: Prompt, **sampling: object) -> ChatSequence:
    params = SamplingParams(**{"max_tokens": 8, **sampling})
    return ChatSequence(ChatRequest("r", "m", prompt, params, 0.0), 8, PAGE)


def digests(prompt: Prompt) -> list[bytes]:
    made = made_sequence(prompt)
    made.extend_digests(made.num_tokens)
    return made.digests


def test_digests_chain_tokens_positions_and_pixels() -> None:
    text = [1, 2, 3]
    image, other = tiny_item(1, [8, 8]), tiny_item(2, [8, 8])
    base = digests(tiny_prompt([text, image, [4] * 6]))
    assert len(base) == len(set(base)) == 4
    assert digests(tiny_prompt([text, image, [4] * 5, [5]]))[:4] == base[:4]
    assert digests(tiny_prompt([text, other, [4] * 6])) != base
    assert digests(tiny_prompt([[9, 2, 3], image, [4] * 6]))[-1] != base[-1]
    moved = tiny_prompt([text, image, [4] * 6])
    moved.positions[:, -6] += 1
    assert digests(moved)[:2] == base[:2] and digests(moved)[2:] != base[2:]


@given(st.integers(1, 30), st.integers(0, 6), st.data())
def test_tokens_and_positions_go_on_into_the_answer(length: int, generated: int, data: st.DataObject) -> None:
    made = made_sequence(tiny_prompt([[5], tiny_item(0, [6]), list(range(length))]))
    made.generated = [70 + i for i in range(generated)]
    start = data.draw(st.integers(0, made.num_tokens))
    end = data.draw(st.integers(start, made.num_tokens))
    ids = [*made.prompt.token_ids.tolist(), *made.generated]
    assert made.token_ids(start, end).tolist() == ids[start:end]
    expected = [[*axis, *range(made.prompt.next_position, 999)][start:end] for axis in made.prompt.positions.tolist()]
    assert made.positions(start, end).tolist() == expected


def test_media_rows_of_a_chunk_carry_their_offset() -> None:
    made = made_sequence(tiny_prompt([[1, 2], tiny_item(0, [12]), [3], tiny_item(1, [4])]))
    rows = [(r.item, r.start, r.offset, r.length) for r in made.media_rows(4, 10)]
    assert rows == [(0, 4, 2, 4), (1, 9, 0, 1)]
    assert made.last_position(0) == 7 and made.last_position(1) == 10


def test_which_requests_need_the_full_sampler() -> None:
    prompt = tiny_prompt([[1]])
    plain = [{"temperature": 0.0, "top_p": 0.5}, {"temperature": 1.0}, {"temperature": 0.01, "top_k": 1, "top_p": 0.1}]
    fields = {name: 0.25 * low + 0.75 * high for name, (low, high) in BOUNDS.items() if name != "temperature"}
    full = [
        *({"temperature": 1.0, name: value} for name, value in fields.items()),
        {"temperature": 0.0, "repetition_penalty": 1.1}, {"temperature": 0.0, "presence_penalty": 1.0},
        {"temperature": 0.0, "logit_bias": {1: 1.0}}, {"temperature": 0.0, "min_tokens": 2},
        {"temperature": 0.0, "logprobs": 0},
    ]  # fmt: skip
    assert not any(made_sequence(prompt, **sampling).needs_penalties_or_filters for sampling in plain)
    assert all(made_sequence(prompt, **sampling).needs_penalties_or_filters for sampling in full)
