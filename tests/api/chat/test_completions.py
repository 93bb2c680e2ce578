"""POST /v1/completions through the openai client, over an engine that answers with the prompt."""

from __future__ import annotations

from typing import Any

import pytest
from openai import NotFoundError, OpenAI


def create(client: OpenAI, prompt: Any, **fields: Any) -> Any:
    return client.completions.create(model="tiny", prompt=prompt, **fields)


@pytest.mark.parametrize("prompt", ["say it", ["say it"], list(b"say it"), [list(b"say it")]])
def test_a_prompt_is_a_text_or_its_ids(client: OpenAI, prompt: Any) -> None:
    answer = create(client, prompt, max_tokens=4)
    assert answer.id.startswith("cmpl-") and (answer.object, answer.model) == ("text_completion", "tiny")
    (choice,) = answer.choices
    assert (choice.index, choice.text, choice.finish_reason, choice.logprobs) == (0, "say ", "length", None)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 4)


def test_sixteen_tokens_unless_said_otherwise(client: OpenAI) -> None:
    assert create(client, "x" * 40).choices[0].text == "x" * 16


def test_reasoning_is_part_of_the_text(client: OpenAI) -> None:
    assert create(client, "<think>a</think>b", max_tokens=40).choices[0].text == "<think>a</think>b"


def test_a_stream_has_all_choices_and_the_usage(client: OpenAI) -> None:
    *chunks, last = create(client, "abc", n=2, stream=True, stream_options={"include_usage": True})
    for index in range(2):
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert "".join(choice.text for choice in own) == "abc"
        assert [choice.finish_reason for choice in own] == [*(None,) * (len(own) - 1), "stop"]
    assert last.choices == [] and last.usage.completion_tokens == 6
    assert [choice.text for choice in create(client, "abc", n=2, stop="c").choices] == ["ab", "ab"]


def test_an_unknown_model_is_named(client: OpenAI) -> None:
    with pytest.raises(NotFoundError):
        client.completions.create(model="nobody", prompt="x")
