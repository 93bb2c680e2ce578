"""Tools with schemas that no grammar can say as a whole: without `strict` they are called nonetheless."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.api.structured.schema_form import UNSUPPORTED as UNENFORCED
from tests.api.chat.test_tools import USER
from tests.support.schemas import UNSUPPORTED
from tests.support.servers import RunningServer

COUNT = {"type": "integer", "minimum": 0, "maximum": 9}
ROWS = [json.loads(line) for line in Path(__file__).with_name("generated_schemas.jsonl").read_text().splitlines()]


def asked(server: RunningServer, parameters: Any, **more: Any) -> httpx.Response:
    function = {"name": "search", "parameters": parameters, **more}
    body = {"model": "tiny", "messages": [USER], "tools": [{"type": "function", "function": function}], "max_tokens": 1}
    return httpx.post(f"{server.url}/v1/chat/completions", json=body)


def test_what_generators_write_is_served(server: RunningServer) -> None:
    """Answers name what is not enforced, and a strict tool is refused by the path of the first such keyword."""
    for origin, schema, _, _, unenforced in ROWS:
        answer = asked(server, schema)
        assert answer.status_code == 200, (origin, answer.text)
        paths = [f"tools[0].function.parameters.{path}" for path in unenforced]
        assert answer.json().get("unenforced", []) == paths, origin
        error = asked(server, schema, strict=True).json().get("error", {})
        refused = [path for path in unenforced if not path.endswith(("uniqueItems", "format"))]
        starts = tuple(f"tools[0].function.parameters: tool search: {path}: " for path in refused)
        assert error.get("message", "").startswith(starts) if refused else not error, (origin, error)


def test_every_unsupported_keyword_is_left_out(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    assert UNSUPPORTED.keys() <= UNENFORCED
    properties = {f"p{index}": {keyword: value} for index, (keyword, value) in enumerate(UNSUPPORTED.items())}
    parameters = {"type": "object", "properties": {**properties, "count": COUNT}, "required": ["count"]}
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert len(asked(server, parameters).json()["unenforced"]) == len(UNSUPPORTED)
    lines = [record.getMessage() for record in caplog.records if "not enforced" in record.getMessage()]
    assert len(lines) == 1 and f"tool search: {len(UNSUPPORTED)} keywords" in lines[0]


def test_a_stream_names_them_with_the_usage(server: RunningServer) -> None:
    schema = {"type": "array", "items": {"type": "string"}, "uniqueItems": True}
    body = {
        "model": "tiny",
        "messages": [USER],
        "max_tokens": 2,
        "stream": True,
        "stream_options": {"include_usage": True},
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    }
    text = httpx.post(f"{server.url}/v1/chat/completions", json=body).text
    *_, last = (json.loads(line.removeprefix("data: ")) for line in text.split("\n") if line.startswith("data: {"))
    assert last["unenforced"] == ["response_format.json_schema.schema.uniqueItems"]
