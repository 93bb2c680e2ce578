"""Markdown in answers: what it becomes, what hostile text does not become, and what is seen while it is written."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.page.browser import Page, script
from tests.support.rows import rows
from tests.support.servers import RunningServer, running_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SCRIPT = script("markdown")
ELEMENTS, ATTRIBUTES = map(set, rows(__file__, "allowed.jsonl"))
LINK = {"target": "_blank", "rel": "noopener noreferrer nofollow"}
HOSTILE: list[str] = rows(__file__, "hostile.jsonl")


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server() as running:
        yield running


@pytest.fixture
def ready(page: Page, server: RunningServer) -> Page:
    page.open(server.url)
    return page


def asked(page: Page, work: str, texts: list[Any]) -> Any:
    page.driver.set_script_timeout(200)
    answer = page.driver.execute_async_script(SCRIPT, work, texts)
    assert isinstance(answer, list), answer
    return answer


def shown(page: Page, text: str) -> list[Any]:
    """The elements, each [name, attributes, *children]."""
    return list(asked(page, "shown", [text])[0]["nodes"])


def plain(node: Any) -> Any:
    """Without attributes: [name, *children]; a text alone stays a text."""
    return node if isinstance(node, str) else [node[0], *map(plain, node[2:])]


def elements(nodes: list[Any]) -> Iterator[Any]:
    for node in nodes:
        if not isinstance(node, str):
            yield node
            yield from elements(node[2:])


def test_marks_become_elements(ready: Page) -> None:
    for text, *expected in rows(__file__, "elements.jsonl"):
        assert list(map(plain, shown(ready, text))) == expected, text
    (box,) = shown(ready, "| a | b |\n|:-:|--:|")
    assert [node[1].get("class") for node in elements([box]) if node[0] == "th"] == ["center", "right"]


def test_links_lead_elsewhere_without_a_trace(ready: Page) -> None:
    text = "[a *b*](https://example.org/x_(y) 't') [a](<http://example.org/x y>) http://example.org/z, <mailto:a@b.c>"
    links = [node for node in elements(shown(ready, text)) if node[0] == "a"]
    assert [node[1]["href"] for node in links] == [
        "https://example.org/x_(y)",
        "http://example.org/x%20y",
        "http://example.org/z",
        "mailto:a@b.c",
    ]
    assert all(LINK.items() <= node[1].items() and node[1]["title"] == node[1]["href"] for node in links)
    nested = [node for node in elements(shown(ready, "[https://a.example](https://b.example)")) if node[0] == "a"]
    assert [node[1]["href"] for node in nested] == ["https://b.example/"]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_text(ready: Page, text: str) -> None:
    made = list(elements(shown(ready, text)))
    assert {node[0] for node in made} <= ELEMENTS
    assert {name for node in made for name in node[1]} <= ATTRIBUTES
    assert all(node[1]["href"].split(":")[0] in {"http", "https", "mailto"} for node in made if node[0] == "a")
    for tag in ("<script>", "onerror", "onload", "<iframe", "<style>", "<base"):
        assert (tag in text) == any(tag in child for node in made for child in node[2:] if isinstance(child, str))
    assert ready.js("window.hit") is None


def test_long_and_deep_text_is_bounded(ready: Page) -> None:
    size = 60_000
    texts = [
        {"text": text, "times": size // len(text), "open": open}
        for text in rows(__file__, "long.jsonl")
        for open in (False, True)
    ]
    for text, made in zip(texts, asked(ready, "made", texts), strict=True):
        assert made["deepest"] < 60, text
        assert made["characters"] <= size, text


DEMO = Path(__file__).with_name("demo.md").read_text()


def test_nothing_flickers_while_an_answer_is_written(ready: Page) -> None:
    """Marks are not seen before they are understood, and what was seen stays where it is."""
    (written,) = asked(ready, "written", [DEMO])
    assert written["same"] and written["kept"]
    for text in written["seen"]:
        assert not any(mark in text for mark in ("**", "~~", "](", "```", "|", "##", "--", "> ")), text
    lengths = [len(text) for text in written["seen"]]
    shrunk = [before - after for before, after in pairwise(lengths) if after < before]
    assert max(shrunk, default=0) <= 2, "no more than a mark goes away"


def test_however_it_arrives_it_is_the_same_in_the_end(ready: Page) -> None:
    rng = random.Random(7)
    marks = ["*", "**", "_", "`", "```", "[", "](http://a.b)", "]", "|", "---", "~~", "\\", "<", "a"]
    pieces = [*marks, "- ", "1. ", "> ", "# ", " b", "  ", "\n", "\n\n"]
    texts = ["".join(rng.choices(pieces, k=30)) for _ in range(150)]
    for text, written in zip(texts, asked(ready, "written", texts), strict=True):
        assert written["same"], text
    for text, made in zip(texts, asked(ready, "shown", texts), strict=True):
        nodes = list(elements(made["nodes"]))
        assert {node[0] for node in nodes} <= ELEMENTS, text
        assert made["text"].count("a") >= text.count("a") - text.count("http://a.b"), text


def test_an_answer_is_copied_and_seen_as_plain_text(ready: Page) -> None:
    ready.driver.execute_script("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    text = "Some **strong** words and `code`."
    ready.ask(text)
    assert ready.text(".answer .words") == "Some strong words and code."
    copy, plain = ready.driver.find_elements("css selector", ".actions button:not(.hear)")
    ready.hold_timers()
    copy.click()
    ready.wait_for("document.querySelector('.actions .copy').textContent === 'Copied'")
    assert ready.js("window.copied") == text
    plain.click()
    assert ready.text(".answer .raw") == text and plain.get_attribute("aria-pressed") == "true"
    assert ready.js("document.querySelector('.answer .raw').checkVisibility()")
    assert not ready.js("document.querySelector('.answer .words').checkVisibility()")
    plain.click()
    assert ready.js("document.querySelector('.answer .words').checkVisibility()")
