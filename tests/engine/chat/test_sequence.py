"""A chat sequence: digests of its pages, prefix hits, tokens, positions and media rows of its chunks."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from models.interfaces.media import Prompt
from service.engine.chat.sequence import ChatSequence
from service.link.messages import ChatRequest
from service.link.sampling import BOUNDS, SamplingParams
from tests.support.tiny_chat import tiny_item, tiny_prompt

PAGE = 4


def sequence(prompt: Prompt, **sampling: object) -> ChatSequence:
    params = SamplingParams(**{"max_tokens": 8, **sampling})
    return ChatSequence(ChatRequest("r", "m", prompt, params, 0.0), 8, PAGE)


def digests(prompt: Prompt) -> list[bytes]:
    made = sequence(prompt)
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


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(0, 12))
@settings(max_examples=60)
def test_a_hit_leaves_a_token_and_asks_for_the_items_of_all_that_follows(lengths: list[int], pages: int) -> None:
    pieces = [piece for i, n in enumerate(lengths) for piece in ([1] * (i + 1), tiny_item(i, [2 * n]))]
    made = sequence(tiny_prompt(pieces))
    hit = made.largest_hit(pages) * PAGE
    assert hit == min(pages * PAGE, (made.num_tokens - 1) // PAGE * PAGE)
    assert set(made.items_from(hit)) == {s.item for s in made.prompt.placeholders if s.start + s.length > hit}


@given(st.integers(1, 30), st.integers(0, 6), st.data())
def test_tokens_and_positions_go_on_into_the_answer(length: int, generated: int, data: st.DataObject) -> None:
    made = sequence(tiny_prompt([[5], tiny_item(0, [6]), list(range(length))]))
    made.generated = [70 + i for i in range(generated)]
    start = data.draw(st.integers(0, made.num_tokens))
    end = data.draw(st.integers(start, made.num_tokens))
    ids = [*made.prompt.token_ids.tolist(), *made.generated]
    assert made.token_ids(start, end).tolist() == ids[start:end]
    expected = [[*axis, *range(made.prompt.next_position, 999)][start:end] for axis in made.prompt.positions.tolist()]
    assert made.positions(start, end).tolist() == expected


def test_media_rows_of_a_chunk_carry_their_offset() -> None:
    made = sequence(tiny_prompt([[1, 2], tiny_item(0, [12]), [3], tiny_item(1, [4])]))
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
    assert not any(sequence(prompt, **sampling).needs_penalties_or_filters for sampling in plain)
    assert all(sequence(prompt, **sampling).needs_penalties_or_filters for sampling in full)
