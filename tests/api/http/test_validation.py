"""What does not fit a schema is said in plain English, with the field and its limit and without the value."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from service.api.chat.schema import ChatRequestBody
from service.api.engines.request_stream import EngineError
from service.api.http import json_body
from service.api.http.errors import ApiError, as_api_error
from service.api.http.json_body import MAX_SIGNS, parse
from service.api.realtime.schema import SessionParams
from service.api.speech.schema import SpeechRequestBody


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    size: Annotated[float, Meta(gt=0, le=2)] = 1


class Body(msgspec.Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(max_length=3)]
    count: Annotated[int, Meta(ge=1)] | Literal["inf"] | None = None
    one: Literal["function"] = "function"
    words: dict[Annotated[str, Meta(min_length=1)], str] = {}
    bias: dict[int, float] = {}
    stop: str | Annotated[list[str], Meta(max_length=2)] | None = None
    stream: bool | None = None
    inner: Inner | None = None


class Lenient(msgspec.Struct):
    name: str = ""
    count: int = 0
    bias: dict[int, float] = {}
    inner: Inner | None = None


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({}, "name", "name: this field is required."),
        ([], None, "The JSON must be an object; an array was given."),
        ({"name": "long"}, "name", "name: must have at most 3 characters."),
        ({"name": 5}, "name", "name: must be a string; an integer was given."),
        ({"name": "n", "count": 0}, "count", "count: must be at least 1."),
        ({"name": "n", "count": "all"}, "count", "count: must be inf or an integer."),
        ({"name": "n", "one": "other"}, "one", "one: must be function."),
        ({"name": "n", "words": {"": "x"}}, "words", "words: each key must have at least 1 character."),
        ({"name": "n", "words": {"a": 5}}, "words", "words: each value must be a string; an integer was given."),
        ({"name": "n", "bias": {"a": 5}}, "bias", "bias: each key must be an integer; a string was given."),
        ({"name": "n", "stop": ["a", "b", "c"]}, "stop", "stop: must have at most 2 items."),
        ({"name": "n", "stop": 5}, "stop", "stop: must be a string or an array; an integer was given."),
        ({"name": "n", "stream": "yes"}, "stream", "stream: must be true or false; a string was given."),
        ({"name": "n", "inner": {"size": 0}}, "inner.size", "inner.size: must be more than 0."),
        ({"name": "n", "inner": {"size": 3}}, "inner.size", "inner.size: must be at most 2."),
        ({"name": "n", "inner": {"other": 3}}, "inner.other", "inner.other: there is no such field."),
        ({"name": "n", "inner": {"other" * 20: 3}}, "inner", "inner: has a field that is not known."),
    ],
)
def test_messages_name_the_field_and_what_it_takes(body: Any, param: str | None, message: str) -> None:
    with pytest.raises((ApiError, msgspec.ValidationError)) as caught:
        parse(msgspec.json.encode(body), Body)
    error = as_api_error(caught.value)
    assert (error.status, error.param, error.message) == (400, param, message)


MESSAGE = {"role": "user", "content": "x"}
VIDEO = [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "data:", "num_frames": 10**30}}]}]
CHAT = {"model": "tiny", "messages": [MESSAGE]}


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        *((ChatRequestBody, CHAT | {name: 10**600}, name) for name in ("min_tokens", "n")),
        (ChatRequestBody, CHAT | {"messages": VIDEO}, "messages[0].content[0].video_url.num_frames"),
        (ChatRequestBody, CHAT | {"mm_processor_kwargs": {"max_frames": 10**600}}, "mm_processor_kwargs.max_frames"),
        (
            ChatRequestBody,
            CHAT | {"audio": {"format": "wav", "inference_timesteps": 10**600}},
            "audio.inference_timesteps",
        ),
        (SpeechRequestBody, {"input": "x", "inference_timesteps": -(10**600)}, "inference_timesteps"),
        (SessionParams, {"audio": {"output": {"inference_timesteps": 10**600}}}, "audio.output.inference_timesteps"),
        (SessionParams, {"audio": {"output": {"format": {"rate": 10**400}}}}, "audio.output.format.rate"),
    ],
)
def test_numbers_of_many_digits_are_refused_with_the_limit(kind: Any, body: Any, param: str) -> None:
    """To repeat them would push the limit out of the message."""
    with pytest.raises(msgspec.ValidationError) as caught:
        parse(json.dumps(body), kind)
    error = as_api_error(caught.value)
    assert error.param == param
    assert re.fullmatch(r"must be at (most|least) \d{1,10}\.", error.message.removeprefix(f"{param}: "))


@pytest.mark.parametrize(
    ("raw", "param", "message"),
    [
        (b"", None, "The JSON is not valid: it ends too early."),
        (b'{"name": "secret', None, "The JSON is not valid: it ends too early."),
        (b'{"name": secret}', None, "The JSON is not valid: invalid character (byte 9)."),
        (b'{"name": NaN}', None, "The JSON is not valid: invalid character (byte 9)."),
        (
            b'{"name": "\\ud800 and more"}',
            None,
            "The JSON is not valid: unexpected end of escaped utf-16 surrogate pair (byte 16).",
        ),
        (b'{"name": "\xff"}', None, "The JSON is not valid: it is not UTF-8."),
        (b"{} more", None, "The JSON is not valid: trailing characters (byte 4)."),
        (b'{"name": "n", "other": ' + b"[" * 500_000, None, "The JSON is not valid: it is nested too deeply."),
        (b'{"count": ' + b"9" * 5000 + b"}", "count", "count: must have at most 4300 digits."),
        (b'{"bias": {"' + b"9" * 5000 + b'": 1}}', "bias", "bias: each key must have at most 4300 digits."),
        (b'{"inner": {"size": 1e999}}', "inner.size", "inner.size: must be at most 2."),
        (b'{"bias": {"3": 1e999}}', "bias", "bias: each value must be between -1.8e+308 and 1.8e+308."),
    ],
)
def test_messages_say_why_json_cannot_be_read(raw: bytes, param: str | None, message: str) -> None:
    with pytest.raises((msgspec.DecodeError, RecursionError, UnicodeDecodeError)) as caught:
        parse(raw, Lenient)
    error = as_api_error(caught.value)
    assert (error.status, error.param, error.message) == (400, param, message)


def test_a_byte_order_mark_is_ignored() -> None:
    text = '{"name": "n", "count": 2}'
    assert parse(text.encode("utf-8-sig"), Lenient) == parse(text.encode(), Lenient)


@pytest.mark.parametrize("raw", ["[" + "[]," * MAX_SIGNS + "0]", b'["' + b"," * MAX_SIGNS + b'"]'])
def test_too_many_values_are_refused_before_any_is_made(raw: bytes | str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_body.msgspec.json, "decode", lambda *_, **__: pytest.fail("values are made"))
    with pytest.raises(ApiError) as caught:
        parse(raw, Any)
    assert (caught.value.status, caught.value.code) == (400, "too_many_values")
    assert str(MAX_SIGNS) in caught.value.message


def test_as_many_values_as_allowed_are_read() -> None:
    assert len(parse(b"[" + b"0," * (MAX_SIGNS - 1) + b"0]", Any)) == MAX_SIGNS


@pytest.mark.parametrize(
    ("message", "field", "says"),
    [
        ("too long", "messages", "messages: too long."),
        ("min_tokens is 5", "min_tokens", "min_tokens is 5."),
        ("the queue is full.", None, "the queue is full."),
    ],
)
def test_what_the_engine_refuses_is_named_too(message: str, field: str | None, says: str) -> None:
    error = as_api_error(EngineError(400, "invalid_value", message, field))
    assert (error.message, error.param) == (says, field)
