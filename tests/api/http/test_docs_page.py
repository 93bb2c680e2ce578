"""/docs: one page, complete, and read without any other host."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import httpx
import pytest
from markupsafe import escape

from service.api.chat.schema import NOT_SPOKEN, REFUSED
from service.api.http.openapi import render
from tests.support.servers import RunningServer


class Page(HTMLParser):
    """Anchors, what links and loads lead to, and tags of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.targets: set[str] = set()
        self.tags: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "src", "action", "data", "srcset"):
                self.targets.add(value or "")


@pytest.fixture(scope="module")
def response(server: RunningServer) -> httpx.Response:
    return httpx.get(f"{server.url}/docs")


@pytest.fixture(scope="module")
def page(response: httpx.Response) -> Page:
    return Page(response.text)


def test_nothing_is_loaded_from_anywhere(response: httpx.Response, page: Page) -> None:
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/html")
    assert not re.search(r"https?://|url\(|@import|//[a-z]+\.", response.text)
    assert "script" not in page.tags
    assert page.targets - {f"#{id}" for id in page.ids} == {"data:,", "openapi.json"}
    assert "default-src 'none'" in response.headers["content-security-policy"]


def test_anchors_are_unique(page: Page) -> None:
    assert len(page.ids) == len(set(page.ids))


def test_every_path_field_and_status_is_there(server: RunningServer, response: httpx.Response) -> None:
    document = httpx.get(f"{server.url}/openapi.json").json()
    assert "/v1/audio/speech/stream" in document["x-websockets"]
    for path, operations in {**document["paths"], **document["x-websockets"]}.items():
        assert path in response.text
        for operation in operations.values() if path in document["paths"] else ():
            assert str(escape(operation["summary"])) in response.text
            assert all(f"<code>{status}</code>" in response.text for status in operation["responses"])
    for schema in document["components"]["schemas"].values():
        for field in schema.get("properties", {}):
            assert f"<code>{field}</code>" in response.text
    refused = response.text.count("not supported: refused unless the value changes nothing")
    assert refused == len(REFUSED) * 2 + len(NOT_SPOKEN)  # at the endpoint and among the types
    n = document["components"]["schemas"]["ChatRequestBody"]["properties"]["n"]
    assert n["anyOf"][0]["maximum"] == server.context.settings.max_n


def test_what_is_described_is_escaped() -> None:
    document = {
        "info": {"title": "<T>", "version": "1", "description": "a & b"},
        "paths": {},
        "x-websockets": {},
        "components": {
            "schemas": {
                "S": {"description": "<b>", "properties": {"<f>": {"enum": ["<e>"]}, "any": {"type": "integer"}}}
            }
        },
    }
    text = render(document)
    for raw in ("<T>", "<b>", "<f>", "<e>"):
        assert raw not in text
    assert "&lt;e&gt;" in text and "a &amp; b" in text
