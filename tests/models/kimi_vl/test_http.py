"""Kimi-VL behind the whole server, through the openai client: pictures, videos, refusals and reasoning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from openai import BadRequestError, OpenAI
from PIL import Image

from service.api.chat.detokenizer import TextAssembler
from service.link.messages import ChatDelta, ChatRequest
from tests.models.kimi_vl.golden import DIRECTORY, PROMPTS, TOKENS, expected, golden_tokens, processor
from tests.support.openai_chat import (
    EXACT,
    ask,
    conversation,
    frame_list_part,
    image_part,
    jpeg,
    openai_client,
    prompt_tokens,
    sampled_item,
    scripted_engine,
    text_part,
    video_part,
)

FLAGS: dict[str, Any] = {
    "model": (str(DIRECTORY),),
    "served_model_name": ("kimi",),
    "device": "cpu",
    "kv_cache_tokens": 4096,
    "max_running": 2,
    "encoder_buckets": (160,),
}


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    with openai_client(FLAGS) as client:
        yield client


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", PROMPTS)
def test_golden_answers(client: OpenAI, name: str, stream: bool) -> None:
    messages = conversation(DIRECTORY, name)
    answer = ask(client, messages, stream=stream, model="kimi", max_tokens=TOKENS, temperature=0, extra_body=EXACT)
    # Special ids, which the golden answers hold, have no text.
    assert answer.content == processor().detokenize(golden_tokens(name)).decode(errors="replace")
    expected_prompt = len(expected()[f"prompt.{name}.input_ids"])
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (expected_prompt, TOKENS)


@pytest.mark.parametrize(("fps", "frames"), [(None, 4), (2.0, 8), (0.25, 1)])
def test_a_video_is_one_frame_a_second_or_fps(client: OpenAI, fps: float | None, frames: int) -> None:
    """20 frames at 5 a second; each is 2 x 3 merged patches of low detail."""
    part = video_part(frames=20, rate=5, **({"fps": fps} if fps else {}))
    answer = ask(client, [part, text_part()], model="kimi", max_tokens=4, extra_body={"ignore_eos": True})
    sampled, item = sampled_item(processor(), frames=20, rate=5, fps=fps)
    assert sampled == frames and item.num_embeds == 6 * frames
    assert answer.usage.prompt_tokens == prompt_tokens(processor(), item)
    assert answer.usage.completion_tokens == 4


def test_a_developer_speaks_as_the_system(client: OpenAI) -> None:
    """Without a system turn the template adds one of its own."""

    def tokens_with(role: str) -> int:
        messages = [{"role": role, "content": "be brief"}, {"role": "user", "content": "why ?"}]
        return ask(client, messages, model="kimi", max_tokens=1).usage.prompt_tokens

    assert tokens_with("developer") == tokens_with("system") < tokens_with("user")


@pytest.mark.parametrize("fps", [None, 0.5, 4.0])
def test_every_frame_of_a_list_is_looked_at(client: OpenAI, fps: float | None) -> None:
    """The model's own rule would take one a second."""
    part = frame_list_part([jpeg()] * 5, **({"fps": fps} if fps else {}))
    details = ask(client, [part], model="kimi", max_tokens=1).usage.prompt_tokens_details
    assert details is not None and details.model_dump()["video_tokens"] == 5 * 6


def test_low_detail_takes_fewer_positions(client: OpenAI) -> None:
    picture = Image.new("RGB", (140, 140), (200, 30, 30))
    used = [
        ask(client, [image_part(picture, detail=detail)], model="kimi", max_tokens=1).usage.prompt_tokens
        for detail in ("high", "low")
    ]
    # 6 x 6 whole patches under the limit of 40 become 8 x 8 by padding; 3 x 3 under 10 become 4 x 4.
    assert used[0] - used[1] == 16 - 4


def test_a_picture_that_is_too_long_is_named(client: OpenAI) -> None:
    with pytest.raises(BadRequestError, match="7140") as refused:
        ask(client, [text_part(), image_part(Image.new("RGB", (7200, 10)))], model="kimi")
    assert refused.value.param == "messages[0].content[1].image_url.url"


@pytest.mark.parametrize(("option", "reason"), [("enable_thinking", "no switch"), ("add_vision_id", "not number")])
def test_options_of_other_templates_are_refused(client: OpenAI, option: str, reason: str) -> None:
    with pytest.raises(BadRequestError, match=reason) as refused:
        ask(client, "why ?", model="kimi", extra_body={"chat_template_kwargs": {option: True}})
    assert refused.value.param == f"chat_template_kwargs.{option}"


THOUGHTS = [
    ("◁think▷the sky 你好 ◁ scatters◁/think▷\n\nIt is blue.", "the sky 你好 ◁ scatters", "It is blue."),
    ("\n◁think▷so◁/think▷yes", "so", "yes"),
    ("It is ◁think▷ blue.", "", "It is ◁think▷ blue."),
    ("◁think▷never done", "never done", ""),
]


@pytest.mark.parametrize(("text", "reasoning", "content"), THOUGHTS)
@pytest.mark.parametrize("size", [1, 2, 5, 1000])
def test_reasoning_is_split_whatever_the_tokens(text: str, reasoning: str, content: str, size: int) -> None:
    """The markers are ordinary text of several tokens, whose characters are cut between tokens."""
    ids = processor().tokenize(text)
    assembler = TextAssembler(processor().detokenize, (), reasoning_markers=processor().reasoning_markers)
    pieces = [assembler.feed(ChatDelta("r", tuple(ids[n : n + size]))) for n in range(0, len(ids), size)]
    pieces.append(assembler.feed(ChatDelta("r", (), finish_reason="stop")))
    assert "".join(piece.reasoning for piece in pieces) == reasoning
    assert "".join(piece.content for piece in pieces) == content
    assert assembler.tokens == len(ids)
    assert assembler.reasoning_tokens == reasoning_tokens(text)


def reasoning_tokens(text: str) -> int:
    """Tokens up to the one that completes the closing marker."""
    ids = processor().tokenize(text)
    opening, closing = processor().reasoning_markers
    if not text.lstrip().startswith(opening):
        return 0
    end = len(text.encode().partition(closing.encode())[0]) + len(closing.encode())
    lengths = np.cumsum([len(processor().detokenize([token])) for token in ids])
    return min(int(np.searchsorted(lengths, end)) + 1, len(ids))


def thought_of(request: ChatRequest) -> list[int]:
    """Of the question "n": THOUGHTS[n]."""
    question = processor().detokenize(request.prompt.token_ids.tolist()).decode()
    return processor().tokenize(THOUGHTS[int(question.removesuffix("assistant")[-1])][0])


@pytest.fixture(scope="module")
def thinker() -> Iterator[OpenAI]:
    with openai_client(FLAGS, scripted_engine(thought_of)) as client:
        yield client


@pytest.mark.parametrize("number", range(len(THOUGHTS)))
def test_reasoning_is_apart_in_answers_and_streams(thinker: OpenAI, number: int) -> None:
    text, reasoning, content = THOUGHTS[number]
    for stream in (False, True):
        answer = ask(thinker, str(number), stream=stream, model="kimi")
        assert (answer.reasoning, answer.content) == (reasoning, content)
        assert answer.usage.completion_tokens_details is not None
        assert answer.usage.completion_tokens_details.reasoning_tokens == reasoning_tokens(text)
