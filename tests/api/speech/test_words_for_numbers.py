"""Numbers reach the engine as words: in a whole text, a streamed one, one that is being written, and an answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

import httpx
import pytest
from websockets.asyncio.client import connect

from service.link.engine_link import InlineLink
from tests.support.fake_talker import FakeTalker, talking_catalog
from tests.support.servers import RunningServer, running_server
from tests.support.waiting import GENEROUS

WRITTEN = "It cost $3.50 on 2026-11-22, at 3:30 pm. Dr. Lee was 1st."
SPOKEN = (
    "It cost three dollars and fifty cents on November twenty-second twenty twenty-six, at three thirty PM. "
    "Doctor Lee was first."
)


@pytest.fixture(scope="module")
def talker() -> FakeTalker:
    return FakeTalker()


@pytest.fixture(scope="module")
def server(talker: FakeTalker) -> Iterator[RunningServer]:
    with running_server(
        talking_catalog(), lambda config: InlineLink(config, talker.serve), fixed_voices=False
    ) as server:
        yield server


def speak(server: RunningServer, **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/audio/speech", json={"response_format": "pcm", **fields}, timeout=GENEROUS)


def engine_text(talker: FakeTalker) -> str:
    """Of the last request."""
    return " ".join(talker.texts[talker.requests[-1].request_id])


@pytest.mark.parametrize("fields", [{"stream": False}, {"stream_format": "sse"}, {"split_granularity": "clause"}])
def test_a_request(server: RunningServer, talker: FakeTalker, fields: dict[str, Any]) -> None:
    assert speak(server, input=WRITTEN, **fields).status_code == 200
    assert engine_text(talker) == SPOKEN


def test_normalize_false_leaves_the_text(server: RunningServer, talker: FakeTalker) -> None:
    assert speak(server, input=WRITTEN, normalize=False).status_code == 200
    assert engine_text(talker) == WRITTEN


def test_chinese(server: RunningServer, talker: FakeTalker) -> None:
    assert speak(server, input="今天是2026年11月22日，涨了50%。").status_code == 200
    assert engine_text(talker) == "今天是二零二六年十一月二十二日，涨了百分之五十。"


def test_a_text_is_short_enough_in_words(server: RunningServer) -> None:
    answer = speak(server, input="$77 " * 1000, stream=False)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "stream"
    assert "numbers in words" in answer.json()["error"]["message"]


def test_what_the_model_cannot_speak_is_named(server: RunningServer) -> None:
    assert unquote(speak(server, input="Hello 世界, 世.").headers["x-unspoken-text"]) == "世界"
    assert '"unspoken":"世界"' in speak(server, input="Hello 世界", stream_format="sse").text
    plain = speak(server, input="Hello", stream_format="sse")
    assert "x-unspoken-text" not in plain.headers and "unspoken" not in plain.text


@pytest.mark.parametrize(
    ("text", "reason"), [("%", "signs by themselves"), ("```\nx = 1\n```", "blocks of code"), ("", "neither words")]
)
def test_why_nothing_is_spoken_is_said(server: RunningServer, text: str, reason: str) -> None:
    answer = speak(server, input=text)
    assert answer.status_code == 400 and reason in answer.json()["error"]["message"]


@pytest.mark.parametrize("piece", [1, 5, 1000])
@pytest.mark.parametrize(("normalize", "text"), [(None, SPOKEN), (False, WRITTEN)])
async def test_a_text_that_is_being_written(
    server: RunningServer, talker: FakeTalker, piece: int, normalize: bool | None, text: str
) -> None:
    url = server.url.replace("http", "ws") + "/v1/audio/speech/stream"
    async with connect(url, open_timeout=GENEROUS) as socket:
        await socket.send(json.dumps({"type": "session.config", "normalize": normalize}))
        for start in range(0, len(WRITTEN), piece):
            await socket.send(json.dumps({"type": "input.text", "text": WRITTEN[start : start + piece]}))
        await socket.send('{"type": "input.done"}')
        while isinstance(message := await socket.recv(), bytes) or json.loads(message)["type"] != "session.done":
            pass
    assert engine_text(talker) == text


@pytest.mark.parametrize(("normalize", "heard"), [(True, "five kilometers"), (False, "5 km")])
def test_a_spoken_answer(server: RunningServer, talker: FakeTalker, normalize: bool, heard: str) -> None:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "It is 5 km."}],
        "modalities": ["text", "audio"],
        "audio": {"voice": "alloy", "format": "wav", "normalize": normalize},
    }
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=GENEROUS)
    assert answer.status_code == 200, answer.text
    assert "5 km" in answer.json()["choices"][0]["message"]["audio"]["transcript"], "the text as it was written"
    assert heard in engine_text(talker)
