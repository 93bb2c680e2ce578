"""What HTTP and OpenAI's protocol ask for beyond the plain request: framing, methods, keys, null, names."""

from __future__ import annotations

import json
import re
from itertools import product
from typing import Any

import httpx
import msgspec
import pytest
from markupsafe import escape
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from service.api.chat.schema import NOT_SPOKEN, REFUSED, ChatRequestBody, StreamOptions
from service.api.http.openapi import fields
from service.hub.catalog import Catalog, HostedModel
from tests.api.test_page import Document
from tests.support.fake_chat import fake_catalog
from tests.support.rows import rows
from tests.support.servers import RunningServer, running_server

USER = {"role": "user", "content": "hello"}


def post(server: RunningServer, **fields: Any) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/chat/completions", json={"model": "tiny", "messages": [USER], **fields})


def test_a_path_tells_its_methods_and_answers_head_as_get_without_the_body(server: RunningServer) -> None:
    with httpx.Client(base_url=server.url) as client:
        for path, allowed in rows(__file__, "methods.jsonl"):
            refused = client.put(path)
            assert (refused.status_code, refused.headers["allow"]) == (405, allowed)
            assert refused.json()["error"]["message"] == f"Method not allowed; this path allows {allowed}."
            if "HEAD" in allowed:
                got, head = client.get(path), client.head(path)
                assert (head.status_code, head.headers["content-type"]) == (200, got.headers["content-type"]), path
                assert head.content == b"" and int(head.headers["content-length"]) > 0
                assert client.get(path).status_code == 200, "the connection was kept and is in step"


def test_a_path_that_is_almost_one_tells_which(server: RunningServer) -> None:
    """A base URL without /v1, or with it twice, is the most common mistake of a client."""
    for scheme, path, said in rows(__file__, "paths.jsonl"):
        response: Any
        if scheme == "ws":
            with pytest.raises(InvalidStatus) as refusal:
                connect(server.url.replace("http", "ws") + path)
            response = refusal.value.response
            error = json.loads(response.body or b"")["error"]
        else:
            response = httpx.post(server.url + path, json={})
            error = response.json()["error"]
        assert response.status_code == 404 and response.headers["x-request-id"].startswith("req_")
        assert (error["message"], error["code"], error["type"]) == (said, "not_found", "not_found_error")


def test_the_description_asks_for_a_key_where_one_is_needed(server: RunningServer) -> None:
    assert "security" not in httpx.get(f"{server.url}/openapi.json").json()
    for metrics_open in (True, False):
        with running_server(api_key=("k",), metrics_open=metrics_open) as locked:
            document = httpx.get(f"{locked.url}/openapi.json").json()
            assert document["security"] == [{"key": []}] and "key" in document["components"]["securitySchemes"]
            for path, operations in document["paths"].items():
                needed = httpx.get(locked.url + path.replace("{", "").replace("}", "")).status_code == 401
                for operation in operations.values():
                    assert operation.get("security", document["security"]) == ([{"key": []}] if needed else []), path


def test_extensions_that_would_change_the_answer_are_refused(server: RunningServer) -> None:
    assert {"n_predict", "stopping_strings", "top_n_sigma", "options", "continue_final_message"} <= REFUSED.keys()
    for field, refused in REFUSED.items():
        value = next(value for value in ({"a": 1}, [1]) if value not in refused.neutral)
        answer = post(server, **{field: value})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"], error["code"]) == (400, field, "unsupported_parameter"), error


def test_and_served_where_they_change_nothing(server: RunningServer) -> None:
    harmless = {field: refused.neutral[0] for field, refused in REFUSED.items() if refused.neutral}
    assert len(harmless) > 40 and {"typical_p", "return_token_ids", "grammar"} <= set(harmless)
    assert post(server, **harmless).status_code == 200


def test_a_field_that_nothing_reads_is_logged_once(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    """A typo is found, habits of clients are not logged, and no client fills the log."""
    for number in range(3):
        unread = {"max_token": 1, "user": "x", "seed": None, "reasoning_effort": "low", f"a {number}": 1}
        assert post(server, **unread).status_code == 200
    assert [record.getMessage() for record in caplog.records if "nothing here reads it" in record.getMessage()] == [
        "/v1/chat/completions: the field max_token is ignored: nothing here reads it"
    ]


def test_who_asks_for_recognition_is_told_that_there_is_none(server: RunningServer) -> None:
    form: dict[str, Any] = {"files": {"file": b"RIFF" * 99_999}, "data": {"model": "whisper-1"}}
    for name, asked in product(("transcriptions", "translations"), (form, {})):
        answer = httpx.post(f"{server.url}/v1/audio/{name}", **asked)
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "no_speech_recognition"


def test_models_say_what_they_take(server: RunningServer) -> None:
    cards = httpx.get(f"{server.url}/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["tiny", "tiny-alias"] and len({card["root"] for card in cards}) == 1
    assert cards[0]["root"] not in ("tiny", "tiny-alias"), "the checkpoint, not a name that it is served under"
    taken = {"input_modalities": ["text", "image", "video"], "output_modalities": ["text"]}
    assert [card["architecture"] for card in cards] == [taken, taken]


def test_clients_made_for_openai_find_the_only_speech_model() -> None:
    chat = fake_catalog().models[0]

    def found(name: str, *speakers: str) -> str | None:
        hosted = [HostedModel((one,), "speech", chat.checkpoint, None, 1) for one in speakers]
        model = Catalog([chat, *hosted]).get(name)
        return model and model.name

    for name in ("tts-1", "tts-1-hd-1106", "gpt-4o-mini-tts", "gpt-4o-mini-tts-2025-12-15"):
        assert [found(name, *speakers) for speakers in (["voice"], ["one", "two"], [])] == ["voice", None, None]
    assert found("tts-1", "tts-1", "other") == "tts-1"


def test_null_means_left_out(server: RunningServer) -> None:
    fields = {field.name: None for field in msgspec.structs.fields(ChatRequestBody) if not field.required}
    options = dict.fromkeys(StreamOptions.__struct_fields__)
    streamed = post(server, **fields | {"stream": True, "stream_options": options})
    assert streamed.status_code == 200 and "usage" not in streamed.text, streamed.text
    assert post(server, **fields | {"chat_template_kwargs": {"enable_thinking": None}}).status_code == 200


@pytest.fixture(scope="module")
def response(server: RunningServer) -> httpx.Response:
    return httpx.get(f"{server.url}/docs")


def test_nothing_is_loaded_from_anywhere_and_anchors_are_unique(response: httpx.Response) -> None:
    page = Document(response.text)
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/html")
    assert not re.search(r"https?://|url\(|@import|//[a-z]+\.", response.text)
    assert "script" not in {tag for tag, _ in page.elements}
    targets = {target for name in ("href", "src", "action", "data", "srcset") for target in page.values(name)}
    assert targets - {f"#{id}" for id in page.values("id")} == {"data:,", "openapi.json"}
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert len(page.values("id")) == len(set(page.values("id")))


def test_every_path_field_and_status_is_there(server: RunningServer, response: httpx.Response) -> None:
    document = httpx.get(f"{server.url}/openapi.json").json()
    for path, operations in document["paths"].items():
        assert path in response.text
        for operation in operations.values():
            assert str(escape(operation["summary"])) in response.text
            assert all(f"<code>{status}</code>" in response.text for status in operation["responses"])
    for schema in document["components"]["schemas"].values():
        assert "\n " not in schema.get("description", "")
        for field in schema.get("properties", {}):
            assert f"<code>{field}</code>" in response.text
    refused = response.text.count("not supported: refused unless the value changes nothing")
    assert refused == len(REFUSED) * 2 + len(NOT_SPOKEN)  # at the endpoint and among the types
    names = [row["name"] for row in fields(document["components"]["schemas"]["ChatRequestBody"])]
    assert set(names[:2]) == {"model", "messages"} and set(names[-len(REFUSED) :]) == set(REFUSED)
    for name, path, asked in (
        ("ChatRequestBody", "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
        ("CompletionBody", "/v1/completions", {"prompt": "hi"}),
    ):
        most = document["components"]["schemas"][name]["properties"]["n"]["anyOf"][0]["maximum"]
        said = [httpx.post(server.url + path, json={"model": "tiny", "n": n, **asked}) for n in (most, most + 1, 10**9)]
        assert [one.status_code for one in said] == [200, 400, 400] and f"at most {most} allowed" in said[2].text
