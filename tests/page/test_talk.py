"""A conversation by voice, with a file as the microphone."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from models.interfaces.media import MediaItem, Prompt
from service.hub.catalog import Catalog
from tests.media.samples import encoded, picture
from tests.page.browser import Page, script
from tests.page.test_browser import SENT, SILENCE, bring, heard
from tests.support.fake_engine import ENDLESS, FakeEngine
from tests.support.fake_hearing import FakeHearing, hearing_catalog
from tests.support.fake_talker import talking_catalog
from tests.support.optional import needed
from tests.support.servers import RunningServer, running_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

KEY = "the-key"
TOLD = script("told")


INTERRUPTED = "document.querySelector('.answer .facts')?.textContent.startsWith('interrupted · stopped')"


class Hearing(FakeHearing):
    """words: what it hears, beside how long it lasts. None: nothing."""

    words: str | None = "Hello"

    def prompt(self, item: MediaItem, **options: Any) -> Prompt:
        if self.words is None:
            item = replace(item, arrays={"samples": np.zeros_like(item.arrays["samples"])})
        return super().prompt(item, **{**options, "context": self.words or ""})


@contextmanager
def conversing_server(*names: str) -> Iterator[tuple[RunningServer, Hearing]]:
    """A server of these models: it hears how long it is spoken to, answers with the question, says 0.1 s of each
    segment. All requests need the key."""
    hearing, talker = Hearing(), FakeEngine()
    ears = replace(hearing_catalog().models[0], load=lambda: hearing)
    catalog = Catalog([model for model in [ears, *talking_catalog().models] if model.name in names])
    flags = {"fixed_voices": "off", "api_key": (KEY,)}
    with running_server(catalog, engine=talker.serve, **flags) as server:
        yield server, hearing


def enter(page: Page, server: RunningServer) -> None:
    page.load(server.url)
    page.wait_for("document.getElementById('key-dialog').open")
    page.type("key", f"{KEY}\n")
    page.open(server.url)
    page.complaints()  # the browser's own note of the first answer
    page.driver.execute_script(SENT)
    page.driver.execute_script(TOLD)


def talk(page: Page) -> None:
    page.click("talk")
    page.wait_for("document.getElementById('hold').checkVisibility()")


def told(page: Page, kind: str) -> list[dict[str, Any]]:
    return [event for event in page.js("window.told") if event["type"] == kind]


@contextmanager
def held(page: Page) -> Iterator[None]:
    """The button is held until a part of a second was sent."""
    chunks = "told.filter(({ type }) => type === 'input_audio_buffer.append').length"
    before = int(page.js(chunks))
    pointer = needed("selenium.webdriver").ActionChains
    pointer(page.driver).click_and_hold(page.element("hold")).perform()
    page.wait_for("document.getElementById('hold').textContent === 'Hearing you'")
    yield
    page.wait_for(f"{chunks} > {before + 20}")
    pointer(page.driver).release().perform()


def speak(page: Page) -> None:
    with held(page):
        pass


def turns(page: Page, number: int) -> list[str]:
    """What is written in so many turns, once they are complete."""
    page.wait_for(f"document.querySelectorAll('#turns > li:not([aria-busy])').length === {number}")
    texts: list[str] = page.js("[...document.querySelectorAll('.asked, .answer .words')].map((one) => one.textContent)")
    return texts


def test_questions_are_asked_by_voice_and_answered_aloud(page: Page) -> None:
    with page.visiting(conversing_server("ears", "tiny", "talker")) as (server, hearing):
        enter(page, server)
        talk(page)
        speak(page)
        asked, answered = turns(page, 2)
        assert re.fullmatch(r"Hello: [0-9.]+ s\.", asked) and answered == asked
        page.wait_for("document.querySelector('.answer .aloud').textContent")
        assert heard(page)["peak"] > SILENCE
        assert re.search(r"first token .* tokens in, \d+ out.*aloud: first audio .* no gaps", page.facts())
        assert told(page, "session.update")[0]["session"]["audio"]["input"]["turn_detection"] is None
        assert page.ask("And in writing?") == "And in writing?"
        assert [one["role"] for one in page.js("sent.at(-1).messages")] == ["user", "assistant", "user"]
        assert not told(page, "conversation.item.create")
        bring(page, "paste", "drawn.png", "image/png", encoded(picture(56, 56), "PNG"))
        page.wait_for("document.querySelectorAll('#attached li').length")
        speak(page)
        assert len(turns(page, 6)) == 6 and page.js("document.querySelectorAll('.asked img').length") == 1
        items = [event["item"] for event in told(page, "conversation.item.create")]
        parts = [[part["type"] for part in item["content"]] for item in items]
        assert parts == [["input_text"], ["output_text"], ["input_image", "input_text"]]
        hearing.words = None
        speak(page)
        page.wait_for("told.at(-1).type === 'conversation.item.delete'")
        assert len(turns(page, 6)) == 6
        page.click("forget")
        page.wait_for("!document.getElementById('talking').checkVisibility()")
        talk(page)
        hearing.words = "Again"
        speak(page)
        assert turns(page, 2)[1].startswith("Again: ")


def test_who_speaks_interrupts(page: Page) -> None:
    with page.visiting(conversing_server("ears", "tiny", "talker")) as (server, hearing):
        enter(page, server)
        hearing.words = ENDLESS
        talk(page)
        speak(page)
        page.wait_for("window.heard.starts > 1")
        assert page.js("document.getElementById('stop-answer').checkVisibility()")
        with held(page):
            page.wait_for(INTERRUPTED)
            before = heard(page)["seconds"]
            hearing.words = "Well"
        assert turns(page, 4)[-1].startswith("Well: ")
        (truncated,) = told(page, "conversation.item.truncate")
        assert 0 <= truncated["audio_end_ms"] < 1000 * heard(page)["seconds"]
        page.wait_for("[...document.querySelectorAll('.aloud')].at(-1).textContent")
        assert 0 < heard(page)["seconds"] - before < 0.5
        hearing.words = ENDLESS
        speak(page)
        page.wait_for("document.getElementById('stop-answer').checkVisibility()")
        page.click("talk")  # with its end all ends
        page.wait_for("document.getElementById('ask').checkVisibility()")
        server.wait_idle()


def test_hands_free_the_server_finds_the_turns(page: Page) -> None:
    with page.visiting(conversing_server("ears", "tiny", "talker")) as (server, hearing):
        enter(page, server)
        hearing.words = ENDLESS
        talk(page)
        page.click("hands-free")
        page.wait_for("document.querySelector('.answer .words')?.textContent")
        assert told(page, "session.update")[-1]["session"]["audio"]["input"]["turn_detection"]["type"] == "server_vad"
        hearing.words = "Well"
        page.wait_for(INTERRUPTED)
        page.wait_for("[...document.querySelectorAll('.answer .words')].at(-1).textContent.startsWith('Well: ')")
        assert told(page, "conversation.item.truncate") and not told(page, "input_audio_buffer.commit")
        assert not page.js("document.getElementById('see-error').textContent")


def test_what_is_hosted_decides_what_there_is(page: Page) -> None:
    with page.visiting(conversing_server("ears")) as (server, _):
        enter(page, server)
        talk(page)
        speak(page)
        assert len(turns(page, 1)) == 1 and not page.js("document.getElementById('see-error').textContent")
    with page.visiting(conversing_server("ears", "tiny")) as (server, _):
        enter(page, server)
        talk(page)
        speak(page)
        asked, answered = turns(page, 2)
        assert answered == asked and told(page, "response.create")[0]["response"]["output_modalities"] == ["text"]
    with page.visiting(conversing_server("tiny", "talker")) as (server, _):
        enter(page, server)
        assert not page.element("talk").is_displayed() and page.element("camera").is_displayed()


def test_without_a_microphone_it_says_why(page: Page) -> None:
    with page.visiting(conversing_server("ears", "tiny")) as (server, _):
        enter(page, server)
        page.driver.execute_script("Object.defineProperty(navigator, 'mediaDevices', { value: undefined })")
        page.click("talk")
        said = page.wait_shown("see-error")
        assert said == "Browsers give a page the microphone over https or on this machine (localhost) only."
        assert not page.element("talking").is_displayed() and page.element("talk").is_enabled()
