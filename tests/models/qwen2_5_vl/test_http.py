"""Qwen2.5-VL behind the whole server, through the openai client: pictures, turns, tools, and videos whose time is told
in every way that a request has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from openai import BadRequestError, OpenAI
from PIL import Image

from models.interfaces.media import ChatMessage, ContentPart, VideoFrames, VideoMetadata
from models.qwen2_5_vl.processor import load_processor
from models.qwen2_vl.processor import Qwen2VLProcessor
from tests.models.qwen2_5_vl.golden import (
    DIRECTORY,
    INPUTS,
    PROMPTS,
    TOKENS,
    VIDEO_PROMPT,
    expected,
    golden_tokens,
    item_names,
    model,
)
from tests.support.chat_golden import generate, golden_video
from tests.support.golden import media_files
from tests.support.openai_chat import (
    EXACT,
    Answer,
    Script,
    ask,
    check_required_call,
    conversation,
    frame_list_part,
    image_part,
    openai_client,
    scripted_engine,
    talk_with_tools,
    text_part,
    video_part,
)
from tests.support.prompts import prompt_of
from tests.support.tool_samples import ADD

FLAGS: dict[str, Any] = {
    "model": (str(DIRECTORY),),
    "served_model_name": ("qwen",),
    "device": "cpu",
    "kv_cache_tokens": 8192,
    "max_running": 2,
    "encoder_buckets": (384, 1024),
}
WITHOUT_VIDEOS = [name for name in PROMPTS if not any(item.startswith("video") for item in item_names(name))]
FRAMES: list[str] = media_files(DIRECTORY, VIDEO_PROMPT, "video")[0]
QUESTION = "when does it turn ?"


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    with openai_client(FLAGS) as client:
        yield client


@cache
def served() -> Qwen2VLProcessor:
    """As the server has it: with the checkpoint's own limits of frames."""
    return load_processor(DIRECTORY)


def text_of(token_ids: list[int]) -> str:
    return served().detokenize(token_ids).decode(errors="replace")


def template_options(name: str) -> dict[str, Any]:
    return {"chat_template_kwargs": {"add_vision_id": INPUTS["prompts"][name]["add_vision_id"]}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", WITHOUT_VIDEOS)
def test_golden_answers(client: OpenAI, name: str, stream: bool) -> None:
    """Text, several pictures, several turns."""
    body = EXACT | template_options(name)
    messages = conversation(DIRECTORY, name)
    answer = ask(client, messages, stream=stream, model="qwen", max_tokens=TOKENS, temperature=0, extra_body=body)
    assert answer.content == text_of(golden_tokens(name))
    expected_prompt = len(expected()[f"prompt.{name}.input_ids"])
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (expected_prompt, TOKENS)


@pytest.mark.parametrize("name", [name for name in WITHOUT_VIDEOS if f"prompt.{name}.penalised_ids" in expected()])
def test_a_request_that_says_nothing_is_sampled_as_the_checkpoint_asks(client: OpenAI, name: str) -> None:
    """Nearly greedy, with a repetition penalty."""
    body = {"ignore_eos": True} | template_options(name)
    answer = ask(client, conversation(DIRECTORY, name), model="qwen", max_tokens=TOKENS, extra_body=body)
    assert answer.content == text_of(expected()[f"prompt.{name}.penalised_ids"].tolist())


def test_a_conversation_with_tools() -> None:
    """The published template for pictures knows no tools: they are in the system message, and results are the
    user's."""
    call = {"id": "", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 40}'}}
    messages = [
        {"role": "user", "content": [image_part(Image.new("RGB", (56, 56))), text_part("how many ?")]},
        {"role": "assistant", "content": "I add .", "tool_calls": [call]},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "It is 42 ."},
        {"role": "user", "content": "and 1 more ?"},
    ]
    script = Script(served().tokenize)
    with openai_client(FLAGS, scripted_engine(script)) as client:
        talk_with_tools(client, script, messages, model="qwen", tools=[ADD])
    system, *turns = text_of(script.prompts[-1]).split("user\n", 1)
    assert system.startswith("system\nYou are a helpful assistant.\n\n# Tools\n\n") and json.dumps(ADD) in system
    assert turns == [
        "how many ?\nassistant\nI add .\n"
        '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 40}}\n</tool_call>\n'
        "user\n<tool_response>\n42\n</tool_response>\n"
        "assistant\nIt is 42 .\nuser\nand 1 more ?\nassistant\n"
    ]


def test_a_required_call(client: OpenAI) -> None:
    check_required_call(client, "qwen")


def frame_list(**options: Any) -> dict[str, Any]:
    return frame_list_part([(DIRECTORY / file).read_bytes() for file in FRAMES], **options)


def ask_about(client: OpenAI, part: dict[str, Any], **fields: Any) -> Answer:
    content, body = [part, text_part(QUESTION)], EXACT | fields
    return ask(client, content, model="qwen", max_tokens=TOKENS, temperature=0, extra_body=body)


@cache
def right_answer(fps: float, times: tuple[float, ...] | None = None) -> str:
    """Without server and engine."""
    clip = golden_video(DIRECTORY, FRAMES, fps=fps)
    if times is not None:
        clip = replace(clip, times=times, times_given=True)
    content = (ContentPart(item=0), ContentPart(text=QUESTION))
    prompt = prompt_of(served(), [ChatMessage("user", content)], [served().video(clip)])
    return text_of(generate(model(), prompt, TOKENS)[2])


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "in the url's object": ({"fps": 0.5}, {}, {}),
    "beside the url": ({}, {"fps": 0.5}, {}),
    "for all media": ({}, {}, {"media_io_kwargs": {"video": {"fps": 0.5}}}),
    "for the processor": ({}, {}, {"mm_processor_kwargs": {"fps": 0.5}}),
    "the nearest one": ({"fps": 0.5}, {"fps": 9}, {"media_io_kwargs": {"video": {"fps": 7}}}),
    "as times": ({"times": [30 + 2 * index for index in range(len(FRAMES))]}, {}, {}),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_rate_of_a_frame_list_is_seen_in_the_answer(client: OpenAI, way: str) -> None:
    inside, beside, request = WAYS[way]
    answer = ask_about(client, frame_list(**inside) | beside, **request)
    assert answer.content == right_answer(0.5)
    assert right_answer(0.5) != right_answer(2.0)


def test_two_frames_a_second_are_assumed_of_a_list_that_tells_no_rate(client: OpenAI) -> None:
    assert ask_about(client, frame_list()).content == right_answer(2.0)


def test_frames_at_uneven_times(client: OpenAI) -> None:
    times = tuple(float(index**2) for index in range(len(FRAMES)))
    answer = ask_about(client, frame_list(times=times))
    assert answer.content == right_answer(1.0, times) != right_answer(1.0)


def tokens_of_video(client: OpenAI, part: dict[str, Any], **fields: Any) -> int:
    details = ask_about(client, part, **fields).usage.prompt_tokens_details
    assert details is not None
    return int(details.model_dump()["video_tokens"])


@pytest.mark.parametrize(
    ("options", "frames"),
    [
        ({}, 8),
        ({"fps": 3}, 12),
        ({"fps": 3, "max_frames": 6}, 6),
        ({"num_frames": 10}, 10),
        ({"num_frames": 20}, 20),
        ({"num_frames": 10, "max_frames": 4}, 4),
        ({"max_frames": 1}, 1),
    ],
)
def test_a_file_is_sampled_as_asked(client: OpenAI, options: dict[str, Any], frames: int) -> None:
    """20 frames at 5 a second, 64 x 48 pixels."""
    metadata = VideoMetadata(20, 5.0, 4.0, 48, 64)
    black = (np.zeros((48, 64, 3), np.uint8),) * frames
    item = served().video(VideoFrames(black, tuple(range(frames)), tuple(map(float, range(frames))), metadata))
    assert tokens_of_video(client, video_part(frames=20, rate=5, **options)) == item.num_embeds
    plain = video_part(frames=20, rate=5)
    assert tokens_of_video(client, plain, media_io_kwargs={"video": options}) == item.num_embeds


@pytest.mark.parametrize(
    ("part", "fields", "param", "reason"),
    [
        ({"fps": 1, "num_frames": 4}, {}, "messages[0].content[0].video_url.num_frames", "excludes fps"),
        ({"num_frames": 10**6}, {}, "messages[0].content[0].video_url.num_frames", "at most 768 allowed"),
        ({"times": [3, 2, 1]}, {}, "messages[0].content[0].video_url.times", "ascending"),
        ({"times": [1, 2], "fps": 1}, {}, "messages[0].content[0].video_url.times", "excludes fps"),
        ({"times": [0.5]}, {}, "messages[0].content[0].video_url.times", "1 given for"),
        ({"times": []}, {}, "messages[0].content[0].video_url.times", "at least 1 item"),
        ({}, {"media_io_kwargs": {"video": {"fps": 1000}}}, "media_io_kwargs.video.fps", "at most 30 allowed"),
        ({}, {"mm_processor_kwargs": {"max_pixels": 9}}, "mm_processor_kwargs.max_pixels", "not supported"),
    ],
)
def test_sampling_that_cannot_be_done_is_named(
    client: OpenAI, part: dict[str, Any], fields: dict[str, Any], param: str, reason: str
) -> None:
    with pytest.raises(BadRequestError, match=reason) as refused:
        ask_about(client, frame_list(**part), **fields)
    assert refused.value.param == param


def test_times_are_for_lists_of_frames(client: OpenAI) -> None:
    part = video_part(frames=4, rate=5, times=[1, 2, 3, 4])
    with pytest.raises(BadRequestError, match="only for lists of frames"):
        ask_about(client, part)
