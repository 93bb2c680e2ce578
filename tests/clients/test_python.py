"""Voice plugins of LiveKit and Pipecat, OpenAI's agents, Cohere's client and LangChain, each as it ships."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from filelock import FileLock
from pydantic import BaseModel

from tests.clients.conftest import seconds_of
from tests.media.samples import data_url
from tests.support.fake_engine import ENDLESS
from tests.support.optional import needed
from tests.support.processes import ROOT, ServerProcess
from tests.support.reranker import running_reranker
from tests.support.servers import RunningServer, running_server
from tests.support.tool_samples import call_text

SOURCE = Path(__file__).parent / "python"
SPOKEN = pytest.approx(0.1, abs=0.06)
"""Seconds of the sentence that the clients have spoken; as 48 kHz played at 24 kHz it would be 0.2."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def environment(name: str) -> Path:
    """The interpreter of an environment with the packages of a file, which is made once."""
    file = SOURCE / name
    key = hashlib.sha256(file.read_bytes() + sys.executable.encode()).hexdigest()[:16]
    folder = ROOT / "build" / "clients" / key
    folder.parent.mkdir(parents=True, exist_ok=True)
    interpreter = folder / "bin/python"
    with FileLock(f"{folder}.lock"):
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=300)
            subprocess.run(
                [interpreter, "-m", "pip", "install", "-q", "--no-compile", "-r", str(file)], check=True, timeout=900
            )
            (folder / "complete").touch()
    return interpreter


def seen_by(script: str, interpreter: Path, server: ServerProcess | RunningServer, *arguments: str) -> Any:
    command = [str(interpreter), str(SOURCE / script), f"{server.url}/v1", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


WHOLE = "6.27 s."
"""The transcript of the whole recording."""


def test_voice_agents(hearing_server: RunningServer, recording: Path) -> None:
    """Their Realtime models ask for turn detection and transcription."""
    interpreter, arguments = environment("requirements.txt"), ("tiny", "talker", str(recording))
    livekit = seen_by("livekit_agent.py", interpreter, hearing_server, *arguments, f"!endless {ENDLESS}.")
    pipecat = seen_by("pipecat_bot.py", interpreter, hearing_server, *arguments)
    for seen in (livekit, pipecat):
        assert seen["pcm"]["seconds"] == SPOKEN
        session = seen["talked"]["session"]
        assert session["instructions"] == "Answer in a few words." and session["audio"]["output"]["voice"] == "marin"
        assert [tool["name"] for tool in session["tools"]] == ["look_up"]
    assert livekit["mp3"]["seconds"] == SPOKEN
    assert livekit["recognized"] == {"text": WHOLE, "language": "en"}
    streamed, talked = livekit["streamed"], livekit["talked"]
    kinds = ["start_of_speech", "end_of_speech", "interim_transcript", "final_transcript", "recognition_usage"]
    assert streamed["kinds"] == kinds
    assert seconds_of(streamed["text"]) == pytest.approx(streamed["seconds"], abs=0.01)
    assert 4.8 < streamed["seconds"] < 5.6
    assert talked["errors"] == [] and talked["unsupported"] == []
    assert talked["session"]["audio"]["input"]["turn_detection"]["type"] == "semantic_vad"
    assert talked["done"] == [{"type": "cancelled", "reason": "turn_detected"}, {"type": "completed"}]
    assert talked["truncated"] == [20] and talked["heard"][-1] == talked["text"]
    assert 4.8 < seconds_of(talked["text"]) < 5.8 and talked["seconds"] > 0
    assert pipecat["recognized"] == [WHOLE]
    assert seconds_of(pipecat["committed"]["text"]) == pytest.approx(seconds_of(WHOLE), abs=0.05)
    turn = ["ProposedUserStartedSpeakingFrame", "ProposedUserStoppedSpeakingFrame"]
    for one in (pipecat["detected"], pipecat["talked"]):
        assert 4.8 < seconds_of(one["text"]) < 5.8 and {*one["turns"]} == {*turn}
    assert [pipecat[name]["errors"] for name in ("committed", "detected", "talked")] == [[]] * 3
    assert pipecat["talked"]["seconds"] > 0


def test_an_agent_with_a_tool() -> None:
    """OpenAI's agents package. Its model says the text of the last message: the call, then what the tool returned."""
    interpreter = environment("requirements-agents.txt")
    with running_server() as server:
        seen = seen_by("agents_loop.py", interpreter, server, "tiny", call_text("add", a=4, b=38))
    assert seen["calls"] == [[4, 38]] * 2 and seen["said"] == ["It is 42."] * 2
    assert seen["items"] == [["tool_call_item", "tool_call_output_item", "message_output_item"]] * 2
    assert {"raw_response_event", "run_item_stream_event"} <= {*seen["events"]}
    assert seen["requests"] == 2 and seen["tokens"] > 0


def test_documents_are_reranked(tmp_path: Path) -> None:
    """Cohere's client."""
    interpreter = environment("requirements-agents.txt")
    with running_reranker(tmp_path) as server:
        seen = seen_by("cohere_rerank.py", interpreter, server, "tiny")
    scores = [score for _, score, _ in seen["results"]]
    assert seen["id"].startswith("rerank-") and scores == sorted(scores, reverse=True)
    assert sorted((index, text) for index, _, text in seen["results"]) == [(0, "a red circle"), (1, "")]


PICTURE = ROOT / "docs/images/shapes.png"


class Seen(BaseModel):
    """A shape in the picture."""

    shape: Literal["circle", "square", "triangle"]


def chat(url: str, model: str, **fields: Any) -> Any:
    fields = {"temperature": 0, "max_tokens": 200, "max_retries": 0, **fields}
    return needed("langchain_openai").ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="none", **fields)


@pytest.fixture(scope="module")
def scripted() -> Iterator[RunningServer]:
    """Its model says the text of the last message."""
    with running_server() as server:
        yield server


@pytest.mark.parametrize("method", ["function_calling", "json_schema", "json_mode"])
def test_structured_output_about_a_picture(embedded_server: ServerProcess, method: str) -> None:
    model = chat(embedded_server.url, "reprise/qwen2_vl").with_structured_output(Seen, method=method)
    url = data_url(PICTURE.read_bytes())
    question = {"type": "text", "text": "What shape is red? Answer in JSON."}
    seen = model.invoke([("user", [{"type": "image_url", "image_url": {"url": url}}, question])])
    assert isinstance(seen, Seen)
    if method != "function_calling":  # the model was trained for JSON and not for tools
        assert seen.shape == "circle"


@pytest.mark.parametrize("streamed", [False, True])
def test_an_agent_with_two_tools(scripted: RunningServer, streamed: bool) -> None:
    """What a tool returns is what the model says next: a call of the other tool, then the answer."""
    calls: list[tuple[str, Any]] = []

    def get_weather(city: str) -> str:
        """The weather of a city."""
        calls.append(("get_weather", city))
        return call_text("add", a=len(city), b=38)

    def add(a: int, b: int) -> str:
        """The sum of two numbers."""
        calls.append(("add", (a, b)))
        return f"It is {a + b} degrees."

    create_agent = needed("langchain.agents").create_agent
    agent = create_agent(chat(scripted.url, "tiny", streaming=streamed), [get_weather, add])
    question = "Let me see.\n" + call_text("get_weather", city="Rome")
    messages = agent.invoke({"messages": [{"role": "user", "content": question}]})["messages"]
    assert calls == [("get_weather", "Rome"), ("add", (4, 38))]
    assert messages[1].content == "Let me see." and messages[-1].content == "It is 42 degrees."
    assert [message.type for message in messages] == ["human", "ai", "tool", "ai", "tool", "ai"]
    assert messages[1].response_metadata["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("streamed", [False, True])
def test_structured_output_over_responses(scripted: RunningServer, streamed: bool) -> None:
    model = chat(scripted.url, "tiny", streaming=streamed, use_responses_api=True)
    seen = model.with_structured_output(Seen, method="json_schema").invoke('{"shape": "circle"}')
    assert seen == Seen(shape="circle")


def test_a_prompt_that_is_too_long_is_known_as_such(scripted: RunningServer) -> None:
    overflow = needed("langchain_core.exceptions").ContextOverflowError
    with pytest.raises(overflow):
        chat(scripted.url, "tiny").invoke("x" * 5000)
