"""Bad requests of every kind: an OpenAI error object with the right status that names the field."""

from __future__ import annotations

import io
import json
import zlib
from typing import Any

import httpx
import pytest
from PIL import Image
from websockets.sync.client import connect

from service.api.http.json_body import MAX_SIGNS
from tests.api.chat.test_chat import frame_list, picture
from tests.media.samples import data_url
from tests.support.servers import RunningServer

USER = {"role": "user", "content": "hi"}


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


def image(url: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}


def video(url: Any, **fields: Any) -> dict[str, Any]:
    part = {"type": "video_url", "video_url": {"url": url, **fields}}
    return {"messages": [{"role": "user", "content": [part]}]}


def parts(*content: Any, role: str = "user") -> dict[str, Any]:
    return {"messages": [{"role": role, "content": list(content)}]}


AT = "messages[0].content[0].image_url.url"
VIDEO_AT = "messages[0].content[0].video_url.url"

BAD: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": ...}, "messages"),
    ({"model": ...}, "model"),
    ({"model": 5}, "model"),
    ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role"),
    ({"messages": [USER, {"role": "function", "content": "x"}]}, "messages[1].role"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ({"messages": [USER] * 1001}, "messages"),
    (parts(*[{"type": "text", "text": "x"}] * 257), "messages"),
    (parts(*[{"type": "image_url", "image_url": picture()}] * 4), "messages"),
    (parts({"type": "input_audio", "input_audio": {}}), "messages[0].content[0].input_audio.data"),
    (parts({"type": "refusal", "refusal": "No."}), "messages[0].content[0].type"),
    (parts({"type": "file", "file": {"file_id": "x"}}), "messages[0].content[0].type"),
    (parts({"type": "image_embeds", "image_embeds": "x"}), "messages[0].content[0].type"),
    (parts({"type": "image_url", "image_url": picture(), "text": "What is it?"}), "messages[0].content[0].text"),
    (parts({"text": "What is it?", "image_url": picture()}), "messages[0].content[0].image_url"),
    (parts({"type": "text"}), "messages[0].content[0].text"),
    (parts({"type": "image_url"}), "messages[0].content[0].image_url"),
    (parts({"type": "image_url", "image_url": {"url": picture()}}, role="system"), "messages[0].content[0]"),
    (image(5), AT),
    (image("https://example.com/x.png"), AT),
    (image("file:///etc/passwd"), AT),
    (image("data:image/png;base64,%%%%"), AT),
    (image("data:image/png,abc"), AT),
    (image(data_url(b"hello, I am text")), AT),
    (image(data_url(b"<html><script>alert(1)</script>")), AT),
    (image(data_url(b"")), AT),
    (image(truncated_png()), AT),
    (image(bomb()), AT),
    (image(picture(1, 300)), AT),
    (
        parts({"type": "image_url", "image_url": {"url": picture(), "detail": "ultra"}}),
        "messages[0].content[0].image_url.detail",
    ),
    (video(data_url(b"no video here", "video/mp4")), VIDEO_AT),
    (video(frame_list(2) + ",x" * 200), VIDEO_AT),
    (video(frame_list(2), fps=1000), "messages[0].content[0].video_url.fps"),
    (video(frame_list(2), fps=0), "messages[0].content[0].video_url.fps"),
    (video(frame_list(2), fps=1e-300), "messages[0].content[0].video_url.fps"),
    (video(frame_list(2), fps=0.0002), VIDEO_AT),
    (video(frame_list(2), times=[0, 1e9]), "messages[0].content[0].video_url.times[1]"),
    (video(frame_list(2), max_frames=10**6), "messages[0].content[0].video_url.max_frames"),
    (
        parts({"type": "image_url", "image_url": {"url": picture(), "max_pixels": 3136}}),
        "messages[0].content[0].image_url.max_pixels",
    ),
    (
        parts({"type": "video_url", "video_url": frame_list(2), "total_pixels": 3136}),
        "messages[0].content[0].total_pixels",
    ),
    (parts({"type": "video_url", "video_url": frame_list(2), "fps": 1000}), "messages[0].content[0].fps"),
    ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages"),
    ({"temperature": 2.5}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": -0.1}, "top_p"),
    ({"min_p": 1.5}, "min_p"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty"),
    ({"n": 5}, "n"),
    ({"n": 10**9}, "n"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 2, "min_tokens": 3}, "min_tokens"),
    ({"seed": 2**63}, "seed"),
    ({"stop": ["a", "b", "c", "d", "e"]}, "stop"),
    ({"stop": ""}, "stop"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logit_bias": {"x": 1}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"logit_bias": {str(token): 1 for token in range(321)}}, "logit_bias"),
    ({"stop_token_ids": [99999]}, "stop_token_ids"),
    ({"stop_token_ids": [65] * 33}, "stop_token_ids"),
    ({"response_format": {"type": "xml"}}, "response_format.type"),
    ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_object", "schema": {"type": "object"}}}, "response_format.schema"),
    *[
        (
            {"response_format": {"type": kind, "json_schema": {"name": "a", "schema": {"type": "integer"}}}},
            "response_format.json_schema",
        )
        for kind in ("text", "json_object")
    ],
    ({"functions": [{"name": "f"}]}, "functions"),
    ({"function_call": {"name": "f"}}, "function_call"),
    ({"guided_json": {"type": "objekt"}}, "guided_json"),
    ({"guided_json": "[1]"}, "guided_json"),
    ({"guided_regex": "("}, "guided_regex"),
    ({"guided_choice": []}, "guided_choice"),
    ({"guided_grammar": "start: other"}, "guided_grammar"),
    ({"structured_outputs": {"json": {"not": {}}}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": {}, "disable_any_whitespace": True}}, "structured_outputs.disable_any_whitespace"),
    ({"structured_outputs": {"choices": ["a"]}}, "structured_outputs.choices"),
    ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_choice"),
    ({"modalities": ["text", "audio"]}, "modalities"),
    ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ({"media_io_kwargs": {"video": {"backend": "other"}}}, "media_io_kwargs.video"),
    ({"media_io_kwargs": {"image": {"mode": "L"}}}, "media_io_kwargs"),
    ({"include_reasoning": False}, "include_reasoning"),
    ({"mm_processor_kwargs": {"size": 1}}, "mm_processor_kwargs"),
    ({"mm_processor_kwargs": {"max_pixels": 1}}, "mm_processor_kwargs.max_pixels"),
    ({"mm_processor_kwargs": {"downsample_mode": "4x"}}, "mm_processor_kwargs.downsample_mode"),
    ({"reasoning": {"exclude": True}}, "reasoning.exclude"),
    ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "thinking"),
    ({"messages": [{"role": "user", "content": "x", "images": ["AA"]}]}, "messages[0].images"),
    ({"chat_template_kwargs": {"tokenize": False}}, "chat_template_kwargs"),
    ({"chat_template_kwargs": {"enable_thinking": "yes"}}, "chat_template_kwargs.enable_thinking"),
]


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


def test_bad_requests_name_the_field(server: RunningServer) -> None:
    for change, param in BAD:
        body = {"model": "tiny", "messages": [USER], **change}
        body = {key: value for key, value in body.items() if value is not ...}
        error = assert_error(post(server, body), 400)
        assert (error["param"] or "").startswith(param), (change, error)
        assert error["type"] == "invalid_request_error"
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
