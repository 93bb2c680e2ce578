"""Placeholders and the tokens of media in their place, against a walk token by token."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.interfaces.errors import InputError, PromptTooLong
from models.interfaces.media import ChatMessage, ContentPart, PlaceholderRange
from models.text.placeholders import MediaTokens, check_length, expand, join, plain, repeated, tokenized_chat

PLACEHOLDER, ROW = 1, 2
TEXT = st.lists(st.integers(10, 20), max_size=4)
PART = st.one_of(TEXT.map(plain), st.integers(1, 5).map(lambda count: repeated(ROW, count)))
MEDIA = st.lists(PART, min_size=1, max_size=4).map(join)


@given(TEXT, st.lists(st.tuples(MEDIA, st.integers(0, 3), TEXT), max_size=5))
def test_items_replace_placeholders(opening: list[int], following: list[tuple[MediaTokens, int, list[int]]]) -> None:
    tokens, expected = list(opening), list(opening)
    for media, _, text in following:
        tokens += [PLACEHOLDER, *text]
        expected += [*media.token_ids.tolist(), *text]
    message = ChatMessage("user", tuple(ContentPart(item=item) for _, item, _ in following))
    chat = tokenized_chat(tokens, [message], {PLACEHOLDER})
    token_ids, placeholders = expand(chat, [media for media, _, _ in following])
    assert token_ids.dtype == np.int32 and token_ids.tolist() == expected
    assert [run.item for run in placeholders] == [item for media, item, _ in following for _ in media.runs]
    rows = [index for run in placeholders for index in range(run.start, run.start + run.length)]
    assert rows == [index for index, token in enumerate(expected) if token == ROW]


def test_runs_that_meet_stay_apart() -> None:
    chat = tokenized_chat([PLACEHOLDER], [ChatMessage("user", (ContentPart(item=0),))], {PLACEHOLDER})
    _, placeholders = expand(chat, [join([repeated(ROW, 2), repeated(ROW, 3)])])
    assert placeholders == (PlaceholderRange(0, 0, 2), PlaceholderRange(0, 2, 3))


@pytest.mark.parametrize("tokens", [[], [PLACEHOLDER] * 2])
def test_a_template_that_drops_or_makes_placeholders_is_refused(tokens: list[int]) -> None:
    with pytest.raises(InputError, match=f"shows {len(tokens)} of the 1 pictures"):
        tokenized_chat(tokens, [ChatMessage("user", (ContentPart(item=0),))], {PLACEHOLDER})


def test_a_prompt_leaves_room_for_an_answer() -> None:
    check_length(np.zeros(7, np.int32), 8)
    with pytest.raises(PromptTooLong, match="length is 8 tokens, of which the prompt takes 8 and the answer"):
        check_length(np.zeros(8, np.int32), 8)
