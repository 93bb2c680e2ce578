"""Kimi-VL behind the whole server, through the openai client: pictures, videos, refusals and reasoning."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from openai import BadRequestError, OpenAI
from PIL import Image

from models.media import ChatMessage, ContentPart, VideoFrames, VideoMetadata
from service.api.text import TextAssembler
from service.catalog import Catalog, load_catalog
from service.engine.config import Channel, EngineConfig
from service.engine.messages import ChatDelta, ChatRequest, EngineState, Outputs, Stop
from service.engine.supervisor import InlineLink
from service.settings import load_settings
from tests.media.samples import video
from tests.models.kimi_vl.golden import DIRECTORY, TOKENS, expected, golden_tokens, processor
from tests.support.prompts import prompt_of
from tests.support.servers import running_server

FLAGS: dict[str, Any] = {
    "model": (str(DIRECTORY),),
    "served_model_name": ("kimi",),
    "device": "cpu",
    "kv_cache_tokens": 4096,
    "max_running": 2,
    "encoder_buckets": (160,),
}
EXACT = {"ignore_eos": True, "top_k": 0, "top_p": 1, "repetition_penalty": 1}


def catalog() -> Catalog:
    return load_catalog(load_settings(FLAGS))


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    with (
        running_server(catalog(), InlineLink, **FLAGS) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client


def image_part(image: Image.Image, **options: str) -> dict[str, Any]:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    data = base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}", **options}}


def golden_picture(index: int) -> dict[str, Any]:
    return image_part(Image.open(DIRECTORY / f"images/image{index}.png"))


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "text": [{"role": "user", "content": "hello world , what is 345 apples ? 你好"}],
    "single": [{"role": "user", "content": [golden_picture(0), text_part("describe the image in detail .")]}],
    "multi": [
        {"role": "system", "content": "You count birds"},
        {"role": "user", "content": [text_part("first"), golden_picture(1), text_part("then"), golden_picture(2)]},
        {"role": "assistant", "content": "two red boats ."},
        {"role": "user", "content": [golden_picture(3), text_part("what is this ?")]},
    ],
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_golden_answers(client: OpenAI, name: str, stream: bool) -> None:
    arguments: dict[str, Any] = {
        "model": "kimi",
        "messages": CONVERSATIONS[name],
        "max_tokens": TOKENS,
        "temperature": 0,
        "extra_body": EXACT,
    }
    if stream:
        chunks = list(client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True}))
        answer = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        usage = chunks[-1].usage
    else:
        completion = client.chat.completions.create(**arguments)
        answer, usage = completion.choices[0].message.content, completion.usage
    # Special ids, which the golden answers hold, have no text.
    assert answer == processor().detokenize(golden_tokens(name)).decode(errors="replace")
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(expected()[f"prompt.{name}.input_ids"]), TOKENS)


@pytest.mark.parametrize(("fps", "frames"), [(None, 4), (2.0, 8), (0.25, 1)])
def test_a_video_is_one_frame_a_second_or_fps(client: OpenAI, fps: float | None, frames: int) -> None:
    """20 frames at 5 a second; each is 2 x 3 merged patches of low detail."""
    data = base64.b64encode(video(frames=20, rate=5)).decode()
    part = {"url": f"data:video/mp4;base64,{data}"} | ({"fps": fps} if fps else {})
    content = [{"type": "video_url", "video_url": part}, text_part("what is this ?")]
    answer = client.chat.completions.create(
        model="kimi",
        messages=[{"role": "user", "content": content}],  # type: ignore[list-item]
        max_tokens=4,
        extra_body={"ignore_eos": True},
    )
    metadata = VideoMetadata(20, 5.0, 4.0, 48, 64)
    indices = processor().sample_video(metadata, fps=fps, max_frames=64)
    assert len(indices) == frames
    black = np.zeros((48, 64, 3), dtype=np.uint8)
    times = tuple(index / 5 for index in indices)
    item = processor().video(VideoFrames((black,) * frames, tuple(indices), times, metadata))
    assert item.num_embeds == 6 * frames
    message = ChatMessage("user", (ContentPart(item=0), ContentPart(text="what is this ?")))
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt_of(processor(), [message], [item]).token_ids)
    assert answer.usage.completion_tokens == 4


def test_a_developer_speaks_as_the_system(client: OpenAI) -> None:
    """Without a system turn the template adds one of its own."""

    def prompt_tokens(role: str) -> int:
        messages: list[Any] = [{"role": role, "content": "be brief"}, {"role": "user", "content": "why ?"}]
        answer = client.chat.completions.create(model="kimi", messages=messages, max_tokens=1)
        assert answer.usage is not None
        return answer.usage.prompt_tokens

    assert prompt_tokens("developer") == prompt_tokens("system") < prompt_tokens("user")


@pytest.mark.parametrize("fps", [None, 0.5, 4.0])
def test_every_frame_of_a_list_is_looked_at(client: OpenAI, fps: float | None) -> None:
    """The model's own rule would take one a second."""
    buffer = io.BytesIO()
    Image.new("RGB", (64, 48), (30, 30, 200)).save(buffer, "JPEG")
    frames = ",".join([base64.b64encode(buffer.getvalue()).decode()] * 5)
    part = {"url": f"data:video/jpeg;base64,{frames}"} | ({"fps": fps} if fps else {})
    answer = client.chat.completions.create(
        model="kimi",
        messages=[{"role": "user", "content": [{"type": "video_url", "video_url": part}]}],  # type: ignore[list-item]
        max_tokens=1,
    )
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.model_dump()["video_tokens"] == 5 * 6


def test_low_detail_takes_fewer_positions(client: OpenAI) -> None:
    picture = Image.new("RGB", (140, 140), (200, 30, 30))
    used = []
    for detail in ("high", "low"):
        answer = client.chat.completions.create(
            model="kimi",
            messages=[{"role": "user", "content": [image_part(picture, detail=detail)]}],  # type: ignore[list-item]
            max_tokens=1,
        )
        assert answer.usage is not None
        used.append(answer.usage.prompt_tokens)
    # 6 x 6 whole patches under the limit of 40 become 8 x 8 by padding; 3 x 3 under 10 become 4 x 4.
    assert used[0] - used[1] == 16 - 4


def test_a_picture_that_is_too_long_is_named(client: OpenAI) -> None:
    content = [text_part("what is this ?"), image_part(Image.new("RGB", (7200, 10)))]
    with pytest.raises(BadRequestError, match="7140") as refused:
        client.chat.completions.create(model="kimi", messages=[{"role": "user", "content": content}])  # type: ignore[list-item]
    assert refused.value.param == "messages[0].content[1].image_url.url"


@pytest.mark.parametrize(("option", "reason"), [("enable_thinking", "no switch"), ("add_vision_id", "not number")])
def test_options_of_other_templates_are_refused(client: OpenAI, option: str, reason: str) -> None:
    with pytest.raises(BadRequestError, match=reason) as refused:
        client.chat.completions.create(
            model="kimi",
            messages=[{"role": "user", "content": "why ?"}],
            extra_body={"chat_template_kwargs": {option: True}},
        )
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


def thinking_engine(config: EngineConfig, channel: Channel) -> None:
    """An EngineEntry that answers the question "n" with THOUGHTS[n], a token at a time."""
    channel.send(Outputs(state=EngineState("ready", "", (), 0)))
    while True:
        for command in channel.receive(0.05):
            if isinstance(command, Stop):
                return
            if isinstance(command, ChatRequest):
                question = processor().detokenize(command.prompt.token_ids.tolist()).decode()
                number = int(question.removesuffix("assistant")[-1])
                for token in processor().tokenize(THOUGHTS[number][0]):
                    channel.send(Outputs(chat=(ChatDelta(command.request_id, (token,)),)))
                channel.send(Outputs(chat=(ChatDelta(command.request_id, (), finish_reason="stop"),)))


@pytest.fixture(scope="module")
def thinker() -> Iterator[OpenAI]:
    def link(config: EngineConfig) -> InlineLink:
        return InlineLink(config, thinking_engine)

    with (
        running_server(catalog(), link, **FLAGS) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client


@pytest.mark.parametrize("number", range(len(THOUGHTS)))
def test_reasoning_is_apart_in_answers_and_streams(thinker: OpenAI, number: int) -> None:
    text, reasoning, content = THOUGHTS[number]
    messages: list[Any] = [{"role": "user", "content": str(number)}]
    answer = thinker.chat.completions.create(model="kimi", messages=messages)
    message = answer.choices[0].message
    assert ((message.model_extra or {}).get("reasoning_content") or "") == reasoning
    assert (message.content or "") == content
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == reasoning_tokens(text)
    streamed = {"content": "", "reasoning_content": ""}
    for chunk in thinker.chat.completions.create(model="kimi", messages=messages, stream=True):
        delta = chunk.choices[0].delta.model_dump()
        for field in streamed:
            streamed[field] += delta.get(field) or ""
    assert streamed == {"content": content, "reasoning_content": reasoning}
