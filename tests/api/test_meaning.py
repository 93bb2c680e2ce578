"""The embedded chat model through the real server: its answers are right however they are asked for."""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Iterator
from typing import Any

import av
import numpy as np
import pytest
from openai import AsyncOpenAI, OpenAI
from PIL import Image

from tests.media.samples import data_url
from tests.support.processes import ROOT, ServerProcess

MODEL = "reprise/qwen2_vl"
WORLD = ROOT / "tests/golden/world"
ENTRIES: list[dict[str, Any]] = json.loads((WORLD / "questions.json").read_text(encoding="utf-8"))
ONLY = "I only know simple shapes, colors, counts, charts, short printed text and simple motion."
SHAPES = ROOT / "docs/images/shapes.png"
SEEN = (
    "I see a large red circle at the left, a large blue square in the center and a large orange triangle at the right."
)

TURNS = (
    ("What color is the square?", "The square is blue."),
    ("And the triangle?", "The triangle is orange."),
    ("How many shapes do you see?", "I see 3 shapes."),
    ("Where is the red circle relative to the blue square?", "The red circle is left of the blue square."),
    ("Is there a dog in the picture?", ONLY),
    ("What shape is red? Answer in JSON.", '{"shape": "circle"}'),
)
MOST_WRONG = 0.08

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture
def client(embedded_server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{embedded_server.url}/v1", api_key="none", max_retries=0, timeout=600) as client:
        yield client


def part_of(medium: dict[str, Any]) -> dict[str, Any]:
    data = (WORLD / medium["file"]).read_bytes()
    if medium["frames"] == 1:
        return {"type": "image_url", "image_url": {"url": data_url(data, "image/webp")}}
    frames = np.split(np.asarray(Image.open(io.BytesIO(data)).convert("RGB")), medium["frames"], axis=1)
    return {"type": "video_url", "video_url": {"url": data_url(mp4(frames), "video/mp4")}}


def shapes_part() -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(SHAPES.read_bytes())}}


def mp4(frames: list[np.ndarray]) -> bytes:
    """Two frames a second, as the processor samples them."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as out:
        stream = out.add_stream("libx264", rate=2, options={"crf": "18"})
        stream.height, stream.width, _ = frames[0].shape
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            out.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        out.mux(stream.encode(None))
    return buffer.getvalue()


def request_of(entry: dict[str, Any]) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for index, (question, answer) in enumerate(entry["turns"]):
        shown = [part_of(medium) for medium in entry["media"]] if index == 0 else []
        messages.append({"role": "user", "content": [*shown, {"type": "text", "text": question}]})
        messages.append({"role": "assistant", "content": answer})
    return {"model": MODEL, "messages": messages[:-1]}


def first_of_each_gate() -> list[dict[str, Any]]:
    return list({entry["gate"]: entry for entry in reversed(ENTRIES)}.values())


async def check_answers(server: ServerProcess) -> None:
    """Ask a question of each gate at once; all but MOST_WRONG answers are right and end by themselves."""
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600) as client:

        async def one(entry: dict[str, Any]) -> tuple[str, str]:
            choice = (await client.chat.completions.create(**request_of(entry))).choices[0]
            return choice.message.content or "", choice.finish_reason

        entries = first_of_each_gate()
        answers = await asyncio.gather(*map(one, entries))
    wrong = [
        (entry["gate"], answer)
        for entry, answer in zip(entries, answers, strict=True)
        if answer != (entry["turns"][-1][1], "stop")
    ]
    assert len(wrong) <= MOST_WRONG * len(entries), wrong


async def test_answers_among_others_are_right_and_end_by_themselves(embedded_server: ServerProcess) -> None:
    await check_answers(embedded_server)


def test_a_streamed_answer_is_the_same(client: OpenAI) -> None:
    message = {"role": "user", "content": [shapes_part(), {"type": "text", "text": "What is in this picture?"}]}
    chunks = client.chat.completions.create(model=MODEL, messages=[message], stream=True)  # type: ignore[list-item]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == SEEN


def test_several_turns_about_a_picture(client: OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": [shapes_part(), {"type": "text", "text": TURNS[0][0]}]}]
    for index, (question, wanted) in enumerate(TURNS):
        if index:
            messages.append({"role": "user", "content": question})
        answer = client.chat.completions.create(model=MODEL, messages=messages).choices[0].message.content
        assert answer == wanted
        messages.append({"role": "assistant", "content": answer})


def test_a_question_without_a_picture(client: OpenAI) -> None:
    message = {"role": "user", "content": "Who are you?"}
    answer = client.chat.completions.create(model=MODEL, messages=[message])  # type: ignore[list-item]
    assert answer.choices[0].message.content.startswith("I am the small demonstration model of Reprise.")  # type: ignore[union-attr]
