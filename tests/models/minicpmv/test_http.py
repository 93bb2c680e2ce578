"""Every version behind the whole server: pictures, sliced pictures and videos through the openai client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from tests.models.minicpmv.golden import PROMPTS, VERSIONS, directory, expectations, inputs, processor
from tests.support.openai_chat import (
    EXACT,
    ask,
    conversation,
    openai_client,
    prompt_tokens,
    sampled_item,
    text_part,
    video_part,
)

FLAGS: dict[str, Any] = {
    "model": tuple(str(directory(version)) for version in VERSIONS),
    "served_model_name": tuple(f"{directory(version)}={version}" for version in VERSIONS),
    "device": "cpu",
    "kv_cache_tokens": 4096,
    "max_running": 2,
    "encoder_buckets": (420,),
    "max_frames": 300,
}


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    with openai_client(FLAGS) as client:
        yield client


@pytest.mark.parametrize(
    ("version", "name"), [one for one in PROMPTS if "max_slice_nums" not in inputs(one[0])["prompts"][one[1]]]
)
def test_golden_answers(client: OpenAI, version: str, name: str) -> None:
    """A picture of one slice and a sliced one, twice."""
    messages, tokens = conversation(directory(version), name), inputs(version)["max_new_tokens"]
    answer = ask(client, messages, model=version, max_tokens=tokens, temperature=0, extra_body=EXACT)
    reference = expectations(version, name)
    assert answer.content == processor(version).detokenize(reference["generated_ids"].tolist()).decode(errors="replace")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(reference["input_ids"]), tokens)


@pytest.mark.parametrize(
    ("version", "frames", "rate", "fps", "groups"),
    [
        ("2.5", 20, 5, None, 4),
        # 5 a second of 36 whole seconds are 180 and not fused, although the video has one frame more.
        ("4.5", 181, 5, 5, 181),
        ("2.6", 20, 5, None, 4),
        ("4.0", 20, 5, 2, 10),
        ("4.5", 20, 5, None, 12),
        ("4.5", 250, 5, 5, 125),
    ],
)
def test_videos(client: OpenAI, version: str, frames: int, rate: int, fps: float | None, groups: int) -> None:
    """The last one is fused: 250 frames in pairs."""
    part = video_part(frames=frames, rate=rate, **({"fps": fps} if fps else {}))
    ignore_eos = {"ignore_eos": True}
    answer = ask(client, [part, text_part()], stream=True, model=version, max_tokens=4, extra_body=ignore_eos)
    _, item = sampled_item(processor(version), frames=frames, rate=rate, fps=fps, max_frames=300)
    assert len(item.arrays["group_sizes"]) == groups
    assert answer.usage.prompt_tokens == prompt_tokens(processor(version), item)
    assert answer.usage.completion_tokens == 4


@pytest.mark.parametrize("thinking", (True, False))
def test_reasoning_is_apart(client: OpenAI, thinking: bool) -> None:
    options = {"ignore_eos": True, "chat_template_kwargs": {"enable_thinking": thinking}}
    whole, streamed = (
        ask(client, "why ?", stream=stream, model="4.5", max_tokens=8, temperature=0, extra_body=options)
        for stream in (False, True)
    )
    assert (bool(whole.reasoning), bool(whole.content)) == (thinking, not thinking)
    assert (streamed.reasoning, streamed.content) == (whole.reasoning, whole.content)


@pytest.mark.parametrize(
    ("version", "option", "reason"),
    [("2.6", "enable_thinking", "no reasoning mode"), ("4.5", "add_vision_id", "a rule of its own")],
)
def test_an_option_that_a_version_does_not_have_is_refused(
    client: OpenAI, version: str, option: str, reason: str
) -> None:
    with pytest.raises(BadRequestError, match=reason) as refused:
        ask(client, "why ?", model=version, extra_body={"chat_template_kwargs": {option: True}})
    assert refused.value.param == f"chat_template_kwargs.{option}"
