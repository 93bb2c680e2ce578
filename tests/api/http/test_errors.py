"""Bad requests of every kind: an OpenAI error object with the right status that names the field."""

from __future__ import annotations

import json
import zlib
from typing import Any

import httpx
import pytest
from websockets.sync.client import connect

from service.api.http.json_body import MAX_SIGNS
from tests.support.refusals import assert_refused, picture, truncated_png
from tests.support.servers import RunningServer

USER = {"role": "user", "content": "hi"}


def image(url: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}


def parts(*content: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(content)}]}


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


@pytest.mark.parametrize(
    "content", [b"", b"{", b"not json", b"\xff\xfe", b'{"model": "\xff"}', b"[" * 100_000, b'{"a": ' * 50_000, b"[]"]
)
def test_what_is_no_json_object(server: RunningServer, content: bytes) -> None:
    assert_error(post(server, content), 400)


@pytest.mark.parametrize(
    "body",
    [
        {"model": "tiny", "messages": [{"role": "SECRET" * 50, "content": "x"}]},
        {"model": "SECRET" * 1000, "messages": [USER]},
        {"model": "tiny", "messages": [USER], "tool_choice": "SECRET" * 100},
        parts({"type": "image_url", "image_url": {"url": picture(), "detail": "SECRET" * 50}}) | {"model": "tiny"},
        {"model": "tiny", "messages": [{"role": "user", "content": [{"type": "SECRET"}] * 250}]},
        {"model": "tiny", "messages": [USER], "chat_template_kwargs": {"SECRET" * 100: 1}},
        image("https://SECRET.example/") | {"model": "tiny"},
    ],
)
def test_errors_do_not_echo_the_input(server: RunningServer, body: dict[str, Any]) -> None:
    response = post(server, body)
    assert response.status_code in (400, 404)
    assert "SECRET" not in response.text and len(response.content) < 1000


@pytest.mark.parametrize("count", [1, 2])
def test_of_a_bad_picture_and_a_bad_option_the_picture_is_named(server: RunningServer, count: int) -> None:
    """Whichever is found first: text is tokenized while pictures are decoded."""
    for urls, field in (
        ([picture()] * count, "chat_template_kwargs.add_vision_id"),
        ([picture()] * (count - 1) + [truncated_png()], f"messages[0].content[{count - 1}].image_url.url"),
        ([picture()] * (count - 1) + ["data:image/png;base64,!"], f"messages[0].content[{count - 1}].image_url.url"),
    ):
        body = parts(*({"type": "image_url", "image_url": {"url": url}} for url in urls)) | {"model": "tiny"}
        body["chat_template_kwargs"] = {"add_vision_id": True}
        assert assert_error(post(server, body), 400)["param"] == field


def test_an_unknown_model_is_404(server: RunningServer) -> None:
    error = assert_error(post(server, {"model": "nope", "messages": [USER]}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert error["message"] == "model: no model of this name is served; chat models here: tiny."
    speech = httpx.post(f"{server.url}/v1/audio/speech", json={"model": "nope", "input": "Hello."})
    assert "there is no speech model here" in assert_error(speech, 404)["message"]
    assert_error(httpx.get(f"{server.url}/v1/models/nope"), 404)
    assert 'model="nope"' not in httpx.get(f"{server.url}/metrics").text


def test_paths_and_methods(server: RunningServer) -> None:
    assert assert_error(httpx.get(f"{server.url}/nope"), 404)["type"] == "not_found_error"
    assert_error(httpx.get(f"{server.url}/v1/chat/completions"), 405)
    assert_error(httpx.post(f"{server.url}/v1/models"), 405)


@pytest.mark.parametrize(
    "path",
    [
        *("/health", "/ready", "/metrics", "/version", "/docs", "/openapi.json", "/v1/models", "/v1/models/tiny"),
        *("/v1/audio/voices", "/v1/audio/voices/nova"),
    ],
)
def test_head_is_answered_as_get_without_the_body(server: RunningServer, path: str) -> None:
    with httpx.Client(base_url=server.url) as client:
        got, head = client.get(path), client.head(path)
        assert (head.status_code, head.headers["content-type"]) == (200, got.headers["content-type"])
        assert head.content == b"" and int(head.headers["content-length"]) > 0
        assert client.get(path).status_code == 200  # the connection was kept and is in step


def test_bodies_over_the_limit_are_413(server: RunningServer) -> None:
    assert_error(post(server, b" " * (4 << 20) + b"{}"), 413)

    def endless() -> Any:
        for _ in range(100):
            yield b" " * 65536

    assert_error(httpx.post(f"{server.url}/v1/chat/completions", content=endless()), 413)


def test_a_schema_written_as_a_text_is_bounded_like_a_body(server: RunningServer) -> None:
    """Signs that are escaped in the body count, too."""
    text = '{"default": [0' + "\\u002c0" * MAX_SIGNS + "]}"
    body = json.dumps({"model": "tiny", "messages": [USER], "guided_json": "@"}).replace("@", text.replace('"', '\\"'))
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


@pytest.mark.parametrize("path", ["/v1/realtime?model=tiny", "/v1/audio/speech/stream"])
def test_the_answer_to_a_handshake_has_the_request_id_too(server: RunningServer, path: str) -> None:
    url = server.url.replace("http", "ws") + path
    with connect(url, additional_headers={"x-request-id": "mine-1"}) as socket:
        assert socket.response is not None and socket.response.headers["x-request-id"] == "mine-1"
    with connect(url) as socket:
        assert socket.response is not None and socket.response.headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize(
    ("given", "kept"),
    [("abc-123", True), ("req_9.x:y", True), ("", False), ("a b", False), ("x" * 129, False), ("é".encode(), False)],
)
def test_a_request_id_is_kept_if_it_is_a_good_one(server: RunningServer, given: str | bytes, kept: bool) -> None:
    told = httpx.get(f"{server.url}/health", headers={"x-request-id": given}).headers["x-request-id"]
    assert told == given if kept else told.startswith("req_")
