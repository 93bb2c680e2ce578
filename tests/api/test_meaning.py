"""The embedded models say what is right, in writing and aloud: a recogniser trained on other voices understands it."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import av
import httpx
import numpy as np
import pytest
import soundfile
import torch
from openai import AsyncOpenAI, OpenAI
from PIL import Image

from tests.media.samples import data_url, sound
from tests.support.processes import ROOT, ServerProcess, served
from tests.support.rows import rows
from tests.support.waiting import GENEROUS
from training.voice.recogniser import Recogniser, distance, down, load, plain

MODEL = "reprise/qwen2_vl"
WORLD = ROOT / "tests/golden/world"
ENTRIES: list[dict[str, Any]] = json.loads((WORLD / "questions.json").read_text(encoding="utf-8"))
SHAPES = ROOT / "docs/images/shapes.png"
SEEN = (
    "I see a large red circle at the left, a large blue square in the center and a large orange triangle at the right."
)

TURNS = rows(__file__, "turns.jsonl")
"""Questions about SHAPES and their answers, as one conversation."""
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


async def check_answers(server: ServerProcess) -> None:
    """Ask a question of each gate at once; all but MOST_WRONG answers are right and end by themselves."""
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=600) as client:

        async def one(entry: dict[str, Any]) -> tuple[str, str]:
            choice = (await client.chat.completions.create(**request_of(entry))).choices[0]
            return choice.message.content or "", choice.finish_reason

        entries = list({entry["gate"]: entry for entry in reversed(ENTRIES)}.values())
        answers = await asyncio.gather(*map(one, entries))
    wrong = [
        (entry["gate"], answer)
        for entry, answer in zip(entries, answers, strict=True)
        if answer != (entry["turns"][-1][1], "stop")
    ]
    assert len(wrong) <= MOST_WRONG * len(entries), wrong


async def test_answers_among_others_are_right_and_end_by_themselves(embedded_server: ServerProcess) -> None:
    await check_answers(embedded_server)


def test_several_turns_about_a_picture(client: OpenAI) -> None:
    messages: list[Any] = [{"role": "user", "content": [shapes_part(), {"type": "text", "text": TURNS[0][0]}]}]
    for index, (question, wanted) in enumerate(TURNS):
        if index:
            messages.append({"role": "user", "content": question})
        answer = client.chat.completions.create(model=MODEL, messages=messages).choices[0].message.content
        assert answer == wanted
        messages.append({"role": "assistant", "content": answer})


SENTENCES, FIRST = rows(__file__, "sentences.jsonl")
"""And what people type first."""
RATE = 48_000
MOST_MISHEARD = 0.15
"""Of the words of all texts: at the worst of seeds it is 0.05 of 120 sentences, and 0.12 of what people type first."""
MOST_MISHEARD_OF_ONE = 0.34
"""Of the words of one sentence: none may be missing, or be another one."""


@pytest.fixture(scope="module")
def recogniser() -> Recogniser:
    return load(torch.device("cpu"))


def listen(recogniser: Recogniser, text: str, wave: np.ndarray) -> tuple[list[str], list[str]]:
    """wave float32 [n] at RATE -> the words of the text, and those that were understood."""
    heard = recogniser(down(torch.from_numpy(wave.copy())[None])[0])
    return recogniser.same(plain(text)).split(), heard.split()


def assert_understood(*speeches: tuple[list[str], list[str]]) -> None:
    wrong = [distance(asked, heard) for asked, heard in speeches]
    words = [len(asked) for asked, _ in speeches]
    assert sum(wrong) <= MOST_MISHEARD * sum(words), speeches
    assert all(each <= MOST_MISHEARD_OF_ONE * of for each, of in zip(wrong, words, strict=True)), speeches


def speech(url: str, text: str) -> np.ndarray:
    """-> float32 [n] at RATE. What other formats make of a sound is in tests/media."""
    body = {"model": "reprise/voxcpm2", "input": text, "seed": 1, "response_format": "wav"}
    answer = httpx.post(f"{url}/v1/audio/speech", json=body, timeout=GENEROUS).raise_for_status()
    wave, rate = soundfile.read(io.BytesIO(answer.content), dtype="float32")
    assert rate == RATE
    return np.asarray(wave)


@pytest.mark.parametrize("texts", [SENTENCES, FIRST], ids=["sentences", "first"])
def test_the_words_of_sentences_are_understood(
    embedded_server: ServerProcess, recogniser: Recogniser, texts: list[str]
) -> None:
    with ThreadPoolExecutor(len(texts)) as pool:
        waves = list(pool.map(lambda text: speech(embedded_server.url, text), texts))
    assert_understood(*(listen(recogniser, text, wave) for text, wave in zip(texts, waves, strict=True)))


def test_the_served_recogniser_hears_the_served_voice(embedded_server: ServerProcess) -> None:
    """Sentence by sentence, and all as one recording that is heard in pieces; noise is nobody's speech."""

    def heard(wave: np.ndarray) -> str:
        url, file = f"{embedded_server.url}/v1/audio/transcriptions", {"file": sound(wave, RATE, "WAV")}
        answer = httpx.post(url, data={"model": "whisper-1"}, files=file, timeout=GENEROUS)
        return plain(answer.raise_for_status().json()["text"])

    said = [text for text in SENTENCES if "triangle" not in text]
    waves = [speech(embedded_server.url, text) for text in said]
    assert_understood(*((plain(text).split(), heard(wave).split()) for text, wave in zip(said, waves, strict=True)))
    long = np.concatenate(4 * waves)
    assert len(long) > 30 * RATE
    assert_understood((plain(" ".join(4 * said)).split(), heard(long).split()))
    noise = np.random.default_rng(0).standard_normal(3 * RATE)
    assert heard(0.1 * noise) == heard(0 * noise) == ""


def test_a_streamed_answer_is_the_same_answer_and_sounds_the_same(client: OpenAI) -> None:
    question, only = TURNS[4]
    content = [shapes_part(), {"type": "text", "text": question}]
    asked: Any = {"model": MODEL, "messages": [{"role": "user", "content": content}], "temperature": 0, "seed": 3}
    asked["audio"] = {"voice": "nova", "format": "pcm16", "sample_rate": 48_000, "max_len": 3}
    asked["modalities"] = ["text", "audio"]
    whole: Any = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(stream=True, **asked))
    audio: list[Any] = [choice.delta.audio for chunk in chunks for choice in chunk.choices if choice.delta.audio]
    text = "".join(entry.transcript or "" for entry in audio)
    assert text == whole.choices[0].message.audio.transcript == only
    sound = base64.b64decode("".join(entry.data or "" for entry in audio))
    before = base64.b64decode(whole.choices[0].message.audio.data)
    assert len(sound) == len(before) > 2 * 7680 * 3
    difference = np.frombuffer(sound, "<i2").astype(int) - np.frombuffer(before, "<i2")
    assert np.abs(difference).max() <= 8


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    home = str(tmp_path_factory.mktemp("home"))
    with served("--quantization", "fp8", "--dtype", "auto", "--max-frames", "16", HOME=home) as running:
        yield running


async def test_answers_of_other_weights_are_right(server: ServerProcess) -> None:
    await check_answers(server)


def test_other_weights_give_the_plain_servers_answer(server: ServerProcess, embedded_server: ServerProcess) -> None:
    message: Any = {"role": "user", "content": [shapes_part(), {"type": "text", "text": "What is in this picture?"}]}
    chances = []
    for url in (server.url, embedded_server.url):
        with OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=600) as client:
            choice = client.chat.completions.create(model=MODEL, messages=[message], logprobs=True).choices[0]
        assert choice.message.content == SEEN
        assert choice.logprobs is not None and choice.logprobs.content is not None
        chances.append([token.logprob for token in choice.logprobs.content])
    assert chances[0] != chances[1]
