"""The embedded voice says what it is asked to: a recogniser that was trained on other voices understands its words."""

from __future__ import annotations

import io
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import av
import httpx
import numpy as np
import pytest
import torch

from service.media.reference_audio import resample
from tests.api.test_meaning import SHAPES
from tests.media.samples import data_url
from tests.support.processes import ServerProcess
from tests.support.waiting import GENEROUS
from training.voice.recogniser import Recogniser, distance, down, load, plain

SENTENCES = (
    "There are three yellow stars.",
    "I see a large blue square.",
    "The picture shows a small red circle and a big green triangle.",
    "My gardener found the old map behind the church.",
    "Frank hurried across the village.",
)
FIRST = ("Hello", "Hello, world!", "OK", "Hi there!", "Thank you.", "Welcome.")
"""Of what people type first."""
RATE = 48_000
MOST_WRONG = 0.15
"""Of the words of all texts: at the worst of seeds it is 0.05 of 120 sentences, and 0.12 of what people type first."""
MOST_WRONG_OF_ONE = 0.34
"""Of the words of one sentence: none may be missing, or be another one."""
MISHEARD = {"sent turn a": "center and a"}
"""What the recogniser hears of natural speech, too: what was said."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def recogniser() -> Recogniser:
    return load(torch.device("cpu"))


def samples(audio: bytes, response_format: str) -> np.ndarray:
    """-> float32 [n] at RATE."""
    if response_format == "pcm":
        return resample(np.frombuffer(audio, "<i2").astype(np.float32) / 32768, 24_000, RATE)
    with av.open(io.BytesIO(audio)) as container:
        resampler = av.AudioResampler(format="flt", layout="mono", rate=RATE)
        decoded = [*container.decode(audio=0), None]
        return np.concatenate([part.to_ndarray()[0] for frame in decoded for part in resampler.resample(frame)])


def listen(recogniser: Recogniser, text: str, wave: np.ndarray) -> tuple[list[str], list[str]]:
    """wave float32 [n] at RATE -> the words of the text, and those that were understood."""
    heard = recogniser(down(torch.from_numpy(wave.copy())[None])[0])
    for wrong, said in MISHEARD.items():
        heard = heard.replace(wrong, said)
    return recogniser.same(plain(text)).split(), heard.split()


def assert_understood(*speeches: tuple[list[str], list[str]]) -> None:
    wrong = [distance(asked, heard) for asked, heard in speeches]
    words = [len(asked) for asked, _ in speeches]
    assert sum(wrong) <= MOST_WRONG * sum(words), speeches
    assert all(each <= MOST_WRONG_OF_ONE * of for each, of in zip(wrong, words, strict=True)), speeches


def speech(url: str, text: str, **settings: object) -> bytes:
    body = {"model": "reprise/voxcpm2", "input": text, "seed": 1, **settings}
    return httpx.post(f"{url}/v1/audio/speech", json=body, timeout=GENEROUS).raise_for_status().content


@pytest.mark.parametrize(
    ("response_format", "sentences"),
    [("mp3", SENTENCES), ("wav", FIRST), ("opus", SENTENCES[:2]), ("pcm", SENTENCES[:2])],
)
def test_the_words_of_sentences_are_understood(
    embedded_server: ServerProcess, recogniser: Recogniser, response_format: str, sentences: Sequence[str]
) -> None:
    """Two in the formats in which the same sound only has other bytes."""
    with ThreadPoolExecutor(len(sentences)) as pool:
        settings = {"response_format": response_format}
        answers = list(pool.map(lambda text: speech(embedded_server.url, text, **settings), sentences))
    waves = [samples(answer, response_format) for answer in answers]
    assert_understood(*(listen(recogniser, text, wave) for text, wave in zip(sentences, waves, strict=True)))


def test_a_described_voice_says_the_text_alone(embedded_server: ServerProcess, recogniser: Recogniser) -> None:
    described = {"response_format": "pcm", "instructions": "A young woman, speaking softly."}
    with ThreadPoolExecutor(len(SENTENCES)) as pool:
        spoken = list(pool.map(lambda text: speech(embedded_server.url, text, **described), SENTENCES))
    assert spoken[0] != speech(embedded_server.url, SENTENCES[0], response_format="pcm")
    assert_understood(
        *(listen(recogniser, t, samples(audio, "pcm")) for t, audio in zip(SENTENCES, spoken, strict=True))
    )


def test_a_spoken_answer_about_a_picture_is_understood(embedded_server: ServerProcess, recogniser: Recogniser) -> None:
    """What the model that sees answers is what the model that speaks says."""
    shown = {"type": "image_url", "image_url": {"url": data_url(SHAPES.read_bytes())}}
    content = [shown, {"type": "text", "text": "Describe the picture."}]
    body = {"model": "reprise/qwen2_vl", "temperature": 0, "messages": [{"role": "user", "content": content}]}
    answer = httpx.post(f"{embedded_server.url}/v1/chat/completions", json=body, timeout=GENEROUS)
    said = answer.raise_for_status().json()["choices"][0]["message"]["content"]
    with ThreadPoolExecutor(3) as pool:
        spoken = list(
            pool.map(lambda seed: speech(embedded_server.url, said, response_format="pcm", seed=seed), range(3))
        )
    heard = [listen(recogniser, said, samples(audio, "pcm")) for audio in spoken]
    assert {"circle", "square"} <= {*heard[0][0]}, said
    assert_understood(*heard)
