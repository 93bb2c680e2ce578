"""A conversation about a picture with the embedded models through the real server, as openai-python holds it."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from openai import OpenAI
from openai.resources.realtime.realtime import RealtimeConnection

from tests.api.test_meaning import ONLY, SHAPES
from tests.support.processes import ServerProcess

MODEL = "reprise/qwen2_vl"
QUESTION = "Is there a dog in the picture?"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore:connect.. must be used as a context manager:DeprecationWarning"),
]


@pytest.fixture
def connection(embedded_server: ServerProcess) -> Iterator[RealtimeConnection]:
    with (
        OpenAI(base_url=f"{embedded_server.url}/v1", api_key="none", max_retries=0, timeout=600) as client,
        client.realtime.connect(model=MODEL) as connection,
    ):
        assert connection.recv().type == "session.created"
        output: Any = {"voice": "nova", "seed": 3, "max_len": 3}
        session: Any = {"type": "realtime", "temperature": 0, "audio": {"output": output}}
        connection.session.update(session=session)
        assert connection.recv().type == "session.updated"
        yield connection


def ask(connection: RealtimeConnection, text: str, *, picture: bool = False) -> None:
    content: list[Any] = [{"type": "input_text", "text": text}]
    if picture:
        url = "data:image/png;base64," + base64.b64encode(SHAPES.read_bytes()).decode()
        content.insert(0, {"type": "input_image", "image_url": url})
    connection.conversation.item.create(item={"type": "message", "role": "user", "content": content})
    assert [connection.recv().type, connection.recv().type] == ["conversation.item.added", "conversation.item.done"]


def respond(connection: RealtimeConnection, **response: Any) -> tuple[str, bytes, Any]:
    """Text or transcript, audio and the response of response.done."""
    connection.response.create(response=response)
    text, sound = "", b""
    for event in connection:
        if event.type in ("response.output_text.delta", "response.output_audio_transcript.delta"):
            text += event.delta
        elif event.type == "response.output_audio.delta":
            sound += base64.b64decode(event.delta)
        elif event.type in ("response.done", "error"):
            assert event.type == "response.done", event
            return text, sound, event.response
    raise AssertionError("the server closed the connection")


def test_questions_about_a_picture_are_answered_in_speech_and_in_text(connection: RealtimeConnection) -> None:
    ask(connection, QUESTION, picture=True)
    text, sound, spoken = respond(connection)
    assert text == ONLY and spoken.status == "incomplete", "max_len cuts each segment of the speech"
    samples = np.frombuffer(sound, "<i2")
    assert np.abs(samples).max() > 30
    patches = spoken.usage.output_token_details.audio_tokens
    assert len(samples) == pytest.approx(patches * 0.16 * 24_000, abs=2)
    assert spoken.usage.input_token_details.image_tokens > 0
    item = spoken.output[0]
    assert item.content[0].transcript == text
    heard = int(len(samples) / 24 / 2)
    connection.conversation.item.truncate(item_id=item.id, content_index=0, audio_end_ms=heard)
    assert connection.recv().type == "conversation.item.truncated"
    connection.conversation.item.retrieve(item_id=item.id)
    event: Any = connection.recv()
    kept = event.item.content[0].transcript
    assert 0 < len(kept) < len(text) and text.startswith(kept)
    ask(connection, "What color is the square?")
    written, silence, done = respond(connection, output_modalities=["text"])
    assert written and not silence and done.output[0].content[0].type == "output_text"
    assert done.usage.input_tokens > spoken.usage.input_tokens
