"""A chat family behind the whole server, through the openai client."""

from __future__ import annotations

import base64
import json
import mimetypes
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from openai import OpenAI
from openai.types import CompletionUsage
from PIL import Image

from models.interfaces.media import MediaItem, VideoFrames, VideoMetadata
from models.text.processor import ChatProcessor
from service.hub.catalog import load_catalog
from service.link.config import Channel, EngineConfig
from service.link.engine_link import ENTRY
from service.link.messages import ChatDelta, ChatRequest, EngineState, Outputs, Stop
from service.settings.settings import load_settings
from tests.media.samples import data_url, encoded, video
from tests.support.golden import inputs
from tests.support.inline_link import EngineEntry, InlineLink
from tests.support.prompts import prompt_of, say
from tests.support.servers import running_server
from tests.support.tool_samples import call_text

EXACT = {"ignore_eos": True, "top_k": 0, "top_p": 1, "repetition_penalty": 1}
"""extra_body of a request for the most likely tokens, beside temperature 0."""
QUESTION = "what is this ?"
THOUGHT_END = "\n</think>\n\n"
_VIDEO_SIZE = (64, 48)


@contextmanager
def openai_client(
    flags: dict[str, Any], engine: EngineEntry | str = ENTRY, *, encoder_buckets: tuple[int, ...] = ()
) -> Iterator[OpenAI]:
    """A client of a server with the settings `flags`. engine: replaces the real one."""

    def link(config: EngineConfig) -> InlineLink:
        return InlineLink(msgspec.structs.replace(config, encoder_buckets=encoder_buckets), engine)

    with (
        running_server(load_catalog(load_settings(flags)), link, **flags) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600) as client,
    ):
        yield client


@dataclass(frozen=True)
class Answer:
    content: str
    reasoning: str
    usage: CompletionUsage


def ask(client: OpenAI, messages: Any, *, stream: bool = False, **arguments: Any) -> Answer:
    """messages: those of the request, or the content of its only one."""
    if isinstance(messages, str) or "role" not in messages[0]:
        messages = [{"role": "user", "content": messages}]
    create = client.chat.completions.create
    if stream:
        chunks = list(create(messages=messages, **arguments, stream=True, stream_options={"include_usage": True}))
        said = [chunk.choices[0].delta.model_dump() for chunk in chunks if chunk.choices]
        usage = chunks[-1].usage
    else:
        completion = create(messages=messages, **arguments)
        said, usage = [completion.choices[0].message.model_dump()], completion.usage
    assert usage is not None
    fields = ("content", "reasoning_content", "reasoning")
    content, reasoning, other = ("".join(one.get(field) or "" for one in said) for field in fields)
    assert reasoning == other, "clients read one name or the other"
    return Answer(content, reasoning, usage)


class Script:
    """For scripted_engine: what is said next, and the prompts that were answered."""

    def __init__(self, tokenize: Callable[[str], list[int]]) -> None:
        self.tokenize = tokenize
        self.said = ""
        self.prompts: list[list[int]] = []

    def __call__(self, request: ChatRequest) -> list[int]:
        self.prompts.append(request.prompt.token_ids.tolist())
        return self.tokenize(self.said)


def talk_with_tools(
    client: OpenAI,
    script: Script,
    messages: Iterable[dict[str, Any]],
    *,
    thinks: bool = False,
    call_text: Callable[..., str] = call_text,
    **arguments: Any,
) -> None:
    """A conversation whose answers, as the model says them, are sent back as they come, with the results of their
    calls. thinks: the prompt opens the reasoning. call_text: how the model writes a call."""
    talk: list[Any] = []
    asked: list[str] = []
    for message in messages:
        if message["role"] == "assistant":
            functions = [call["function"] for call in message.get("tool_calls", [])]
            calls = [call_text(one["name"], **json.loads(one["arguments"])) for one in functions]
            thought = message.get("reasoning_content", "") + THOUGHT_END if thinks else ""
            script.said = thought + "\n".join([message["content"], *calls] if message["content"] else calls)
            (answer,) = client.chat.completions.create(messages=talk, **arguments).choices
            said = answer.message.tool_calls or []
            assert [(one.function.name, json.loads(one.function.arguments)) for one in said] == [
                (one["name"], json.loads(one["arguments"])) for one in functions
            ]
            assert (answer.message.content or "") == message["content"]
            assert answer.finish_reason == ("tool_calls" if calls else "stop")
            asked += [call.id for call in said]
            talk.append(answer.message)
        else:
            talk.append({**message, "tool_call_id": asked.pop(0)} if message["role"] == "tool" else message)
    script.said = f"{THOUGHT_END if thinks else ''}so be it"
    (last,) = client.chat.completions.create(messages=talk, **arguments).choices
    assert (last.message.content, last.finish_reason) == ("so be it", "stop")


def check_required_call(client: OpenAI, model: str, **fields: Any) -> None:
    """Only the grammar makes random weights call."""
    skies = ["clear", "grey"]
    schema = {"type": "object", "properties": {"sky": {"enum": skies}}, "required": ["sky"]}
    (answer,) = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": QUESTION}],
        tools=[{"type": "function", "function": {"name": "paint", "parameters": schema}}],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=200,
        **fields,
    ).choices
    assert (answer.finish_reason, answer.message.content) == ("tool_calls", None)
    (call,) = answer.message.tool_calls or []
    assert call.type == "function" and call.function.name == "paint"
    assert json.loads(call.function.arguments)["sky"] in skies


def text_part(text: str = QUESTION) -> dict[str, Any]:
    return {"type": "text", "text": text}


def video_part(*, frames: int, rate: int, **options: Any) -> dict[str, Any]:
    """A file of so many frames at `rate` a second, 64 x 48 pixels. options: fields beside the url, such as fps."""
    data = video(frames=frames, rate=rate, size=_VIDEO_SIZE)
    return {"type": "video_url", "video_url": {"url": data_url(data, "video/mp4"), **options}}


def frame_list_part(frames: Iterable[bytes], **options: Any) -> dict[str, Any]:
    """A video of encoded pictures. options: fields beside the url, such as fps."""
    listed = ",".join(base64.b64encode(frame).decode() for frame in frames)
    return {"type": "video_url", "video_url": {"url": f"data:video/jpeg;base64,{listed}", **options}}


def jpeg() -> bytes:
    """A blue picture of 64 x 48 pixels."""
    return encoded(Image.new("RGB", _VIDEO_SIZE, (30, 30, 200)), "JPEG")


def conversation(directory: Path, name: str) -> list[dict[str, Any]]:
    """A prompt of a golden directory, without videos, as a request has it."""

    def part_of(part: dict[str, Any]) -> dict[str, Any]:
        if part["type"] == "text":
            return part
        kind = mimetypes.guess_type(part["image"])[0]
        data = (directory / part["image"]).read_bytes()
        return {"type": "image_url", "image_url": {"url": data_url(data, str(kind))}}

    asked: list[str] = []
    messages = []
    for message in inputs(directory)["prompts"][name]["messages"]:
        content = message["content"] if isinstance(message["content"], str) else [*map(part_of, message["content"])]
        fields = {**message, "content": content}
        if "tool_calls" in message:
            asked += (ids := [f"call_{len(asked) + index}" for index in range(len(message["tool_calls"]))])
            fields["tool_calls"] = [*map(_sent_call, message["tool_calls"], ids)]
        if message["role"] == "tool":
            fields["tool_call_id"] = asked.pop(0)
        messages.append(fields)
    return messages


def sampled_item(
    processor: ChatProcessor, *, frames: int, rate: int, fps: float | None, max_frames: int = 64
) -> tuple[int, MediaItem]:
    """How many frames the family samples of a video_part, and the item that becomes of it. Its pixels are black."""
    width, height = _VIDEO_SIZE
    metadata = VideoMetadata(frames, float(rate), frames / rate, height, width)
    indices = tuple(processor.sample_video(metadata, fps=fps, max_frames=max_frames))
    black = (np.zeros((height, width, 3), dtype=np.uint8),) * len(indices)
    times = tuple(index / rate for index in indices)
    return len(indices), processor.video(VideoFrames(black, indices, times, metadata, requested_fps=fps))


def prompt_tokens(processor: ChatProcessor, item: MediaItem) -> int:
    """Of QUESTION behind the item."""
    message = say("user", 0, QUESTION)
    return len(prompt_of(processor, [message], [item]).token_ids)


def scripted_engine(script: Callable[[ChatRequest], Iterable[int]]) -> EngineEntry:
    """An engine that answers each request with the tokens of script(request), one in a message."""

    def serve(config: EngineConfig, channel: Channel) -> None:
        channel.send(Outputs(state=EngineState("ready", "", (), 0)))
        while True:
            for command in channel.receive(0.05):
                if isinstance(command, Stop):
                    return
                if isinstance(command, ChatRequest):
                    for token in script(command):
                        channel.send(Outputs(chat=(ChatDelta(command.request_id, (token,)),)))
                    channel.send(Outputs(chat=(ChatDelta(command.request_id, (), finish_reason="stop"),)))

    return serve


def _sent_call(call: dict[str, Any], id: str) -> dict[str, Any]:
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {"id": id, "type": "function", "function": {"name": function["name"], "arguments": arguments}}
