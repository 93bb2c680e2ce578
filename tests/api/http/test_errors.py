"""Bad requests of every kind: an OpenAI error object with the right status that names the field."""

from __future__ import annotations

import json
import re
import zlib
from typing import Annotated, Any, Literal

import httpx
import msgspec
import pytest
from msgspec import Meta
from websockets.sync.client import connect

from service.api.chat.schema import ChatRequestBody
from service.api.engines.request_stream import EngineError
from service.api.http import json_body
from service.api.http.errors import ApiError, as_api_error
from service.api.http.json_body import MAX_SIGNS, parse
from service.api.realtime.schema import SessionParams
from service.api.speech.schema import SpeechRequestBody
from tests.support.refusals import assert_refused, cases, picture
from tests.support.rows import rows
from tests.support.servers import RunningServer

USER = {"role": "user", "content": "hi"}


def post(server: RunningServer, body: Any, **options: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return httpx.post(f"{server.url}/v1/chat/completions", content=content, **options)


def assert_error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"] and len(response.content) < 1000
    assert response.headers["x-request-id"]
    return body["error"]


@pytest.mark.parametrize(
    ("name", "path", "usual"),
    [
        ("chat", "chat/completions", {"messages": [USER]}),
        ("tools", "chat/completions", {"messages": [USER]}),
        ("completions", "completions", {"prompt": "x"}),
        ("responses", "responses", {"input": "x"}),
    ],
)
def test_bad_requests_name_the_field(server: RunningServer, name: str, path: str, usual: dict[str, Any]) -> None:
    assert_refused(f"{server.url}/v1/{path}", name, model="tiny", **usual)
    server.wait_idle()


def test_what_is_no_json_object(server: RunningServer) -> None:
    for content in (b"", b"{", b"not json", b"\xff\xfe", b"[" * 100_000, b'{"a": ' * 50_000, b"[]"):
        assert_error(post(server, content), 400)


def test_errors_do_not_echo_the_input(server: RunningServer) -> None:
    for fields in cases("secrets"):
        response = post(server, {"model": "tiny", "messages": [USER], **fields})
        assert response.status_code in (400, 404)
        assert "SECRET" not in response.text and len(response.content) < 1000


def test_an_option_that_the_template_has_not_is_named_beside_a_picture(server: RunningServer) -> None:
    content = [{"type": "image_url", "image_url": {"url": picture()}}]
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}]}
    body |= {"chat_template_kwargs": {"add_vision_id": True}}
    assert assert_error(post(server, body), 400)["param"] == "chat_template_kwargs.add_vision_id"


def test_an_unknown_model_is_404(server: RunningServer) -> None:
    error = assert_error(post(server, {"model": "nope", "messages": [USER]}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert error["message"] == "model: no model of this name is served; chat models here: tiny."
    speech = httpx.post(f"{server.url}/v1/audio/speech", json={"model": "nope", "input": "Hello."})
    assert "there is no speech model here" in assert_error(speech, 404)["message"]
    assert_error(httpx.get(f"{server.url}/v1/models/nope"), 404)
    assert 'model="nope"' not in httpx.get(f"{server.url}/metrics").text


def test_bodies_over_the_limit_are_413(server: RunningServer) -> None:
    assert_error(post(server, b" " * (4 << 20) + b"{}"), 413)

    def endless() -> Any:
        for _ in range(100):
            yield b" " * 65536

    assert_error(httpx.post(f"{server.url}/v1/chat/completions", content=endless()), 413)


def test_a_schema_written_as_a_text_is_bounded_like_a_body(server: RunningServer) -> None:
    """Signs that are escaped in the body count, too."""
    text = '{"default": [0' + "\\u002c0" * MAX_SIGNS + "]}"
    body = json.dumps({"model": "tiny", "messages": [USER], "structured_outputs": {"json": "@"}})
    body = body.replace("@", text.replace('"', '\\"'))
    assert assert_error(post(server, body.encode()), 400)["code"] == "too_many_values"


def test_compressed_bodies_are_415(server: RunningServer) -> None:
    body = json.dumps({"model": "tiny", "messages": [USER], "max_tokens": 1}).encode()
    assert_error(post(server, zlib.compress(body), headers={"content-encoding": "deflate"}), 415)
    for nothing in ("identity", "Identity", ""):
        assert post(server, body, headers={"content-encoding": nothing}).status_code == 200


def test_a_failure_before_the_first_token_has_a_status(server: RunningServer) -> None:
    for stream in (True, False):
        body = {"model": "tiny", "messages": [{"role": "user", "content": "!fail"}], "stream": stream}
        assert assert_error(post(server, body), 500)["code"] == "fake_failure"


def test_a_request_id_is_kept_if_it_is_a_good_one(server: RunningServer) -> None:
    """In the answer to a handshake, too."""
    for given in ("abc-123", "req_9.x:y", "", "a b", "x" * 129, "é".encode()):
        told = httpx.get(f"{server.url}/health", headers={"x-request-id": given}).headers["x-request-id"]
        assert told == given if given in ("abc-123", "req_9.x:y") else told.startswith("req_")
    for path in ("/v1/realtime?model=tiny", "/v1/audio/speech/stream"):
        for headers, begin in (({"x-request-id": "mine-1"}, "mine-1"), ({}, "req_")):
            with connect(server.url.replace("http", "ws") + path, additional_headers=headers) as socket:
                assert socket.response is not None and socket.response.headers["x-request-id"].startswith(begin)


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


def test_messages_name_the_field_and_what_it_takes() -> None:
    for body, param, message in rows(__file__, "messages.jsonl"):
        with pytest.raises((ApiError, msgspec.ValidationError)) as caught:
            parse(msgspec.json.encode(body), Body)
        error = as_api_error(caught.value)
        assert (error.status, error.param, error.message) == (400, param, message)


SCHEMAS = {"chat": ChatRequestBody, "speech": SpeechRequestBody, "session": SessionParams}


def test_numbers_of_many_digits_are_refused_with_the_limit() -> None:
    """To repeat them would push the limit out of the message."""
    for schema, param, body in rows(__file__, "digits.jsonl"):
        with pytest.raises(msgspec.ValidationError) as caught:
            parse(re.sub(r'"(-?)@"', rf"\g<1>1{'0' * 600}", json.dumps(body)), SCHEMAS[schema])
        error = as_api_error(caught.value)
        assert error.param == param
        assert re.fullmatch(r"must be at (most|least) \d{1,10}\.", error.message.removeprefix(f"{param}: "))


def test_messages_say_why_json_cannot_be_read() -> None:
    """Rows: bytes as characters, in which @ stands for a sign that often."""
    for raw, sign, times, param, message in rows(__file__, "unread.jsonl"):
        with pytest.raises((msgspec.DecodeError, RecursionError, UnicodeDecodeError)) as caught:
            parse(raw.replace("@", sign * times).encode("latin-1"), Lenient)
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
