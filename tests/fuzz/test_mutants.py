"""Mutated JSON bodies against the real server, the same on every machine: refused or answered, never a crash, a hang or
a 5xx. Mutated media are refused in tests/media."""

from __future__ import annotations

import copy
import json
import random
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from typing import Any

import httpx
import pytest

from tests.media.samples import mutations
from tests.support.processes import served
from tests.support.tool_samples import ADD, TIME, WEATHER, asked, result
from tests.support.victims import SMALL, Patient, chat, image_part, speech, video_part
from tests.support.waiting import GENEROUS

CHAT_PATH, SPEECH_PATH = "/v1/chat/completions", "/v1/audio/speech"
CLIENTS = 3
SEED = 20_000
LIMITS = (
    *("--max-output-tokens", "8", "--max-n", "2", "--max-speech-chars", "200", "--max-frames", "8"),
    *("--max-body", "4M", "--max-request-pixels", "8000000"),
)
LEAK = re.compile(rb"Traceback|site-packages|/work|/home|\.py\b|0x[0-9a-f]{6,}|<[a-z_.]+ object")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


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
    return chat("List.", tokens=3, response_format=asked, structured_outputs=others)


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


def _reshaped(*bodies: dict[str, Any]) -> Iterator[bytes]:
    """Values replaced by hostile ones, keys dropped or doubled, lists grown: still JSON, mostly."""
    rng = random.Random(SEED)
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


def _mutants() -> dict[str, tuple[str, Iterator[bytes]]]:
    """By kind the path, and bodies: reshaped ones, and such with other bytes."""
    texts = [json.dumps(body).encode() for body in (chat("Hm.", tokens=2), speech("Hm.", max_len=2))]
    chats = [_rich_chat(), _guided_chat(), chat("Hm.", tokens=2, stream=True)]
    return {
        "chat": (CHAT_PATH, islice(_reshaped(*chats), 240)),
        "tools": (CHAT_PATH, islice(_reshaped(_chat_with_tools()), 120)),
        "speech": (SPEECH_PATH, islice(_reshaped(_rich_speech()), 90)),
        "chat text": (CHAT_PATH, mutations(texts[0], 60, SEED)),
        "speech text": (SPEECH_PATH, mutations(texts[1], 60, SEED)),
    }


def _problem(response: httpx.Response) -> str:
    """What is wrong with an answer; empty if nothing is."""
    body = response.content
    if response.status_code >= 500:
        return f"{response.status_code} {body[:200]!r}"
    if response.status_code < 400:
        return f"failed in mid-stream: {body[-200:]!r}" if b'"error":{' in body and b"data:" in body else ""
    try:
        error = json.loads(body)["error"]
    except (ValueError, KeyError):
        return f"not an error object: {body[:200]!r}"
    if set(error) != {"message", "type", "param", "code"} or not error["message"]:
        return f"not OpenAI's error object: {error}"
    return f"says too much: {body[:300]!r}" if LEAK.search(body) or len(body) > 2000 else ""


def test_mutated_bodies(tmp_path: Any) -> None:
    with served(*SMALL, *LIMITS, "--voices-dir", str(tmp_path / "voices"), TMPDIR=str(tmp_path)) as server:
        patient = Patient(server, tmp_path).examine()
        restarts = patient.metric("reprise_engine_restarts_total")

        def send(case: tuple[str, str, bytes]) -> tuple[str, int, str]:
            kind, path, body = case
            response = http.post(path, content=body, headers={"content-type": "application/json"})
            return kind, response.status_code, _problem(response)

        cases = [(kind, path, body) for kind, (path, bodies) in _mutants().items() for body in bodies]
        with httpx.Client(base_url=patient.url, timeout=GENEROUS) as http, ThreadPoolExecutor(CLIENTS) as clients:
            outcomes = list(clients.map(send, cases))
        problems = [f"{kind}: {problem}" for kind, _, problem in outcomes if problem]
        assert not problems, "\n".join(problems)
        statuses = Counter((kind, status) for kind, status, _ in outcomes)
        for kind in _mutants():
            assert statuses[kind, 400], f"no mutant of {kind} was refused: nothing was tested"
        assert statuses["chat", 200] and statuses["tools", 200]
        assert patient.metric("reprise_engine_restarts_total") == restarts
        patient.assert_well()
