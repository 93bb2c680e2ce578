"""Requests that are refused, as data: each line of tests/api/refused/NAME.jsonl has what differs from a usual body, the
field that is named, and a part of the message. "@..." stands for a sample, "@absent" for a field that is left out, and
{"repeat": x, "times": n} for a long text or list."""

from __future__ import annotations

import io
import json
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
from PIL import Image

from tests.media.samples import data_url, encoded, sound, tone
from tests.support.tool_samples import TOOLS, asked, tool
from tests.support.waiting import GENEROUS

FOLDER = Path(__file__).parent.parent / "api/refused"


def picture(width: int = 16, height: int = 12, color: str = "red", kind: str = "PNG") -> str:
    return data_url(encoded(Image.new("RGB", (width, height), color), kind), f"image/{kind.lower()}")


def frame_list(count: int) -> str:
    frames = [picture(color=color, kind="JPEG").partition(",")[2] for color in ("red", "blue") * count]
    return "data:video/jpeg;base64," + ",".join(frames[:count])


def truncated_png() -> str:
    buffer = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(buffer, "PNG")
    return data_url(buffer.getvalue()[:-400])


def bomb() -> str:
    """A PNG that says 20000 x 15000 in a few hundred bytes."""

    def piece(kind: bytes, body: bytes) -> bytes:
        return len(body).to_bytes(4, "big") + kind + body + zlib.crc32(kind + body).to_bytes(4, "big")

    header = (20000).to_bytes(4, "big") + (15000).to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    return data_url(b"\x89PNG\r\n\x1a\n" + piece(b"IHDR", header) + piece(b"IDAT", zlib.compress(bytes(1000))))


def clip(seconds: float = 0.6) -> str:
    return data_url(sound(tone(220, 16_000, seconds, 0.3), 16_000, "WAV"), "audio/wav")


SAMPLES: dict[str, Callable[[], Any]] = {
    "@picture": picture,
    "@narrow": lambda: picture(width=3),
    "@tall": lambda: picture(1, 300),
    "@truncated": truncated_png,
    "@bomb": bomb,
    "@frames": lambda: frame_list(2),
    "@many frames": lambda: frame_list(2) + ",x" * 200,
    "@clip": clip,
    "@long clip": lambda: clip(61),
    "@tools": lambda: TOOLS,
    "@many tools": lambda: [tool(f"f{index}") for index in range(129)],
    "@many functions": lambda: [{"type": "function", "name": f"f{number}"} for number in range(129)],
    "@open brackets": lambda: '{"a":' + "[" * 100_000,
    "@many calls": lambda: asked(*[(f"{index}", "add", "{}") for index in range(129)])["tool_calls"],
    "@many biases": lambda: {str(token): 1 for token in range(321)},
    "@many words": lambda: {f"w{number}": "x" for number in range(101)},
}


@cache
def sample(name: str) -> Any:
    return SAMPLES[name]()


def expanded(value: Any) -> Any:
    if isinstance(value, str):
        return sample(value) if value in SAMPLES else value
    if isinstance(value, list):
        return [expanded(one) for one in value]
    if isinstance(value, dict) and value.keys() == {"repeat", "times"}:
        return expanded(value["repeat"]) * value["times"]
    return {name: expanded(one) for name, one in value.items()} if isinstance(value, dict) else value


def cases(name: str) -> Iterator[Any]:
    """What the lines of refused/NAME.jsonl say, with the samples that they name."""
    for line in (FOLDER / f"{name}.jsonl").read_text().splitlines():
        yield expanded(json.loads(line))


def assert_refused(url: str, name: str, **usual: Any) -> None:
    """That each request of the file is, at this address; with what is said in the file."""
    for case in cases(name):
        body = {field: value for field, value in {**usual, **case["body"]}.items() if value != "@absent"}
        response = httpx.post(url, json=body, timeout=2 * GENEROUS)
        told = f"{str(case)[:500]} {response.text}"
        assert response.status_code == 400 and len(response.content) < 1000, told
        assert set(response.json()) == {"error"} and response.headers["x-request-id"]
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"} and error["type"] == "invalid_request_error"
        assert error["param"] == case["param"] and case.get("says", "") in error["message"], told
        assert error["message"].startswith(case["param"] or ""), told
        assert error["code"] == case.get("code", error["code"]), told
