"""Mutated media and JSON bodies with fixed seeds: the same number gives the same request on every machine."""

from __future__ import annotations

import copy
import itertools
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tests.media.samples import encoded, mutations, picture, sound, sound_by_av, tone, video
from tests.support.tool_samples import ADD, TIME, WEATHER, asked, result
from tests.support.victims import chat, data_url, image_part, speech, video_part

CHAT_PATH = "/v1/chat/completions"
SPEECH_PATH = "/v1/audio/speech"


@dataclass(frozen=True)
class Mutant:
    kind: str
    number: int
    path: str
    body: bytes


def _pictures() -> list[bytes]:
    plain = picture(48, 40)
    return [
        encoded(plain, "PNG"),
        encoded(plain.convert("P"), "PNG", optimize=True),
        encoded(plain, "JPEG"),
        encoded(plain, "JPEG", progressive=True, subsampling=2),
        encoded(plain, "WEBP"),
        encoded(plain, "WEBP", lossless=True),
        encoded(plain, "GIF"),
        encoded(plain, "BMP"),
    ]


def _videos() -> list[bytes]:
    return [
        video(frames=6, rate=4),
        video("matroska", frames=6, rate=4),
        video("webm", "libvpx", frames=6, rate=4),
        video("avi", "mjpeg", frames=6, rate=4),
    ]


def _clips() -> list[bytes]:
    wave = tone(220, 16_000, 0.5)
    return [
        sound(wave, 16_000, "WAV"),
        sound(wave, 16_000, "FLAC"),
        sound_by_av(wave, 16_000, "mp3", "libmp3lame"),
        sound(wave, 16_000, "OGG", "VORBIS"),
    ]


def _image_body(data: bytes) -> dict[str, Any]:
    return chat("?", {"type": "image_url", "image_url": {"url": data_url(data)}}, tokens=1)


def _video_body(data: bytes) -> dict[str, Any]:
    return chat("?", {"type": "video_url", "video_url": {"url": data_url(data, "video/mp4")}}, tokens=1)


def _clip_body(data: bytes) -> dict[str, Any]:
    return speech("So.", ref_audio=data_url(data, "audio/wav"), max_len=2)


HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63 - 1, -(2**63), 2**64, 2**80, 1e308, -1e-308, float("nan"), float("inf"),
    "", "x", "\u0000", "\ud83d\ude00", "ÿ" * 3000, "<|im_end|>", "<|image_pad|>" * 40,
    "{{ 7 * 7 }}", "../../etc/passwd",
    "data:,", "data:image/png;base64,", "data:image/png;base64,====", "https://127.0.0.1/x", "file:///etc/passwd",
    "http://[::1", [], {}, [[]], [None], [{}], {"": None}, {"type": "text"}, [1, "2", 3.0], {"url": 3},
)  # fmt: skip
DEEP = "[" * 3000 + "]" * 3000
_DEEP_MARK = "a place for depth"


def _rich_chat() -> dict[str, Any]:
    return chat(
        "Look.", image_part(28, 28), video_part(2), tokens=2, stream=False, n=1, top_p=0.9, top_k=5, min_p=0.1,
        presence_penalty=0.1, frequency_penalty=0.1, repetition_penalty=1.1, logit_bias={"5": 1.0}, seed=3, stop=["zz"],
        stop_token_ids=[7], logprobs=True, top_logprobs=2, min_tokens=0, stream_options=None, response_format=None,
        chat_template_kwargs={"enable_thinking": False}, user="u", max_completion_tokens=2,
    )  # fmt: skip


def _chat_with_tools() -> dict[str, Any]:
    body = chat(
        "Look.", tokens=4, tools=[WEATHER, ADD, TIME], tool_choice={"type": "function", "function": {"name": "add"}},
        parallel_tool_calls=False, stream=True,
    )  # fmt: skip
    calls = asked(("a", "get_weather", '{"city": "Rome", "days": [{"x": 1.5}]}'), ("b", "now", "{}"))
    results = [{**result("b", ""), "content": [{"type": "text", "text": "Noon."}]}, result("a", "Sunny.")]
    return {**body, "messages": [*body["messages"], calls, *results]}


def _guided_chat() -> dict[str, Any]:
    one = {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "required": ["a"]}
    many = {"type": "array", "items": {"anyOf": [one, {"enum": ["x", 1]}]}, "minItems": 1, "maxItems": 3}
    name = {"type": "string", "pattern": "^(a|b)*c{1,3}$", "maxLength": 9}
    schema = {**many, "$defs": {"b": {"allOf": [name, {"minLength": 2}]}, "n": {"type": "integer", "multipleOf": 3}}}
    asked = {"type": "json_schema", "json_schema": {"name": "n", "strict": True, "schema": schema}}
    others = {"json": None, "regex": None, "choice": None, "grammar": None}
    return chat("List.", tokens=3, response_format=asked, structured_outputs=others, guided_choice=None)


def _rich_speech() -> dict[str, Any]:
    return speech(
        "Well.", voice="alloy", instructions="slowly", speed=1.1, sample_rate=48000, cfg_value=2.0, temperature=0.9,
        inference_timesteps=None, min_len=1, max_len=2, split_granularity="sentence",
        stream_format="audio", stream=True,
        ref_audio=None, ref_text=None, prompt_audio=None, prompt_text=None, max_new_tokens=2,
    )  # fmt: skip


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of a JSON value with every key in it."""
    keys: Any = node.keys() if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    for key in list(keys):
        yield node, key
        yield from _places(node[key])


def _reshaped(bodies: list[dict[str, Any]], seed: int) -> Iterator[bytes]:
    """Values replaced by hostile ones, keys dropped or doubled, lists grown: still JSON, mostly."""
    rng = random.Random(seed)
    while True:
        body = copy.deepcopy(rng.choice(bodies))
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            holder, key = rng.choice(list(_places(body)))
            match rng.randrange(8):
                case 0:
                    del holder[key]
                case 1 if isinstance(holder, list):
                    holder.extend(holder[: 1 + rng.randrange(3)] * rng.randrange(1, 12))
                case 2 if isinstance(holder, dict):
                    holder[f"{key}{rng.randrange(10)}"] = holder.pop(key)
                case 3 if rng.random() < 0.3:
                    holder[key] = _DEEP_MARK
                case _:
                    holder[key] = copy.deepcopy(rng.choice(HOSTILE))
            if not body:
                break
        yield json.dumps(body).replace(json.dumps(_DEEP_MARK), DEEP).encode()


def _mutated_bytes(sources: list[bytes], seed: int) -> Iterator[bytes]:
    """Mutants of each source in turn."""
    streams = [mutations(source, 1 << 30, seed + index) for index, source in enumerate(sources)]
    for stream in itertools.cycle(streams):
        yield next(stream)


def mutants(counts: dict[str, int], seed: int) -> Iterator[Mutant]:
    """counts: how many of picture, video, clip, chat, tools, speech (reshaped bodies) and text (bytes of bodies)."""

    def wrapped(sources: list[bytes], body: Callable[[bytes], dict[str, Any]]) -> Iterator[bytes]:
        return (json.dumps(body(data)).encode() for data in _mutated_bytes(sources, seed))

    texts = [json.dumps(body).encode() for body in (chat("Hm.", tokens=2), speech("Hm.", max_len=2))]
    kinds: dict[str, tuple[str, Iterator[bytes]]] = {
        "picture": (CHAT_PATH, wrapped(_pictures(), _image_body)),
        "video": (CHAT_PATH, wrapped(_videos(), _video_body)),
        "clip": (SPEECH_PATH, wrapped(_clips(), _clip_body)),
        "chat": (CHAT_PATH, _reshaped([_rich_chat(), _guided_chat(), chat("Hm.", tokens=2, stream=True)], seed)),
        "tools": (CHAT_PATH, _reshaped([_chat_with_tools()], seed)),
        "speech": (SPEECH_PATH, _reshaped([_rich_speech()], seed)),
        "text": ("", _mutated_bytes(texts, seed)),
    }
    for kind, count in counts.items():
        path, bodies = kinds[kind]
        for number, body in enumerate(itertools.islice(bodies, count)):
            yield Mutant(kind, number, path or (CHAT_PATH, SPEECH_PATH)[number % 2], body)
