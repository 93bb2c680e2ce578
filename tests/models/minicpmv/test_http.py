"""Every version behind the whole server: pictures, sliced pictures and videos through the openai client."""

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
from service.catalog import load_catalog
from service.engine.supervisor import InlineLink
from service.settings import load_settings
from tests.media.samples import video
from tests.models.minicpmv.golden import VERSIONS, directory, expectations, inputs, picture, processor
from tests.support.prompts import prompt_of
from tests.support.servers import running_server

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
    catalog = load_catalog(load_settings(FLAGS))
    with (
        running_server(catalog, InlineLink, **FLAGS) as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield client


def image_part(image: Image.Image) -> dict[str, Any]:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    data = base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def video_part(frames: int, rate: int, **options: float) -> dict[str, Any]:
    data = base64.b64encode(video(frames=frames, rate=rate)).decode()
    return {"type": "video_url", "video_url": {"url": f"data:video/mp4;base64,{data}", **options}}


@pytest.mark.parametrize("name", ["images", "image_thin"])
@pytest.mark.parametrize("version", VERSIONS)
def test_golden_answers(client: OpenAI, version: str, name: str) -> None:
    """A picture of one slice and a sliced one, twice."""
    (message,) = inputs(version)["prompts"][name]["messages"]
    content = [
        part if part["type"] == "text" else image_part(picture(version, part["image"])) for part in message["content"]
    ]
    answer = client.chat.completions.create(
        model=version,
        messages=[{"role": "user", "content": content}],  # type: ignore[misc, list-item]
        max_tokens=16,
        temperature=0,
        extra_body={"ignore_eos": True, "top_k": 0, "top_p": 1, "repetition_penalty": 1},
    )
    reference = expectations(version, name)
    expected = processor(version).detokenize(reference["generated_ids"].tolist()).decode(errors="replace")
    assert answer.choices[0].message.content == expected
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(reference["input_ids"])
    assert answer.usage.completion_tokens == 16


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
    part = video_part(frames, rate, **({"fps": fps} if fps else {}))
    stream = client.chat.completions.create(
        model=version,
        messages=[{"role": "user", "content": [part, {"type": "text", "text": "what is this ?"}]}],  # type: ignore[misc, list-item]
        max_tokens=4,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    *_, last = stream
    assert last.usage is not None
    assert last.usage.completion_tokens == 4
    owner = processor(version)
    clip = VideoMetadata(frames, float(rate), frames / rate, 48, 64)
    black = np.zeros((48, 64, 3), dtype=np.uint8)
    indices = owner.sample_video(clip, fps=fps, max_frames=300)
    times = tuple(index / rate for index in indices)
    item = owner.video(VideoFrames((black,) * len(indices), tuple(indices), times, clip, requested_fps=fps))
    assert len(item.arrays["group_sizes"]) == groups
    message = ChatMessage("user", (ContentPart(item=0), ContentPart(text="what is this ?")))
    assert last.usage.prompt_tokens == len(prompt_of(owner, [message], [item]).token_ids)


@pytest.mark.parametrize("thinking", (True, False))
def test_reasoning_is_apart(client: OpenAI, thinking: bool) -> None:
    arguments: dict[str, Any] = {
        "model": "4.5",
        "messages": [{"role": "user", "content": "why ?"}],
        "max_tokens": 8,
        "temperature": 0,
        "extra_body": {"ignore_eos": True, "chat_template_kwargs": {"enable_thinking": thinking}},
    }
    message = client.chat.completions.create(**arguments).choices[0].message
    reasoning = (message.model_extra or {}).get("reasoning_content")
    assert (bool(reasoning), bool(message.content)) == (thinking, not thinking)
    deltas = [chunk.choices[0].delta for chunk in client.chat.completions.create(**arguments, stream=True)]
    assert "".join(delta.content or "" for delta in deltas) == message.content
    assert "".join((delta.model_extra or {}).get("reasoning_content", "") for delta in deltas) == (reasoning or "")


@pytest.mark.parametrize(
    ("version", "option", "reason"),
    [("2.6", "enable_thinking", "no reasoning mode"), ("4.5", "add_vision_id", "a rule of its own")],
)
def test_an_option_that_a_version_does_not_have_is_refused(
    client: OpenAI, version: str, option: str, reason: str
) -> None:
    with pytest.raises(BadRequestError, match=reason) as refused:
        client.chat.completions.create(
            model=version,
            messages=[{"role": "user", "content": "why ?"}],
            extra_body={"chat_template_kwargs": {option: True}},
        )
    assert refused.value.param == f"chat_template_kwargs.{option}"
