"""The page as a person uses it, in Chromium, against the server with the embedded models."""

from __future__ import annotations

import base64
import re
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.media.samples import encoded, picture, video
from tests.media.test_audio_out import by_av
from tests.page.browser import Page, script
from tests.support.fake_engine import FakeEngine
from tests.support.fake_talker import talking_catalog
from tests.support.processes import ROOT, ServerProcess, served
from tests.support.servers import running_server
from tests.support.waiting import GENEROUS, wait

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SHAPES = ROOT / "docs/images/shapes.png"
SILENCE = 1e-3
PCM_RATE = 24_000
SENT = script("sent")
SPEAK_AGAIN = """
document.getElementById("text").dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", ctrlKey: true }));
"""
LOST = "The server cannot be reached. Is it still running?"
FORGET_TIMERS = "for (let id = setTimeout(() => {}, 0); id > 0; id -= 1) clearTimeout(id);"
"""The page does not look after the server by itself any more."""
PAST_DRAWN = (
    "document.querySelector('.line0')?.getAttribute('d').match(/[ML]/g).length"
    " > performance.getEntriesByType('resource').filter(({ name }) => name.endsWith('/metrics')).length"
)
"""A plot has more points than the page has read metrics."""


def bring(page: Page, kind: str, name: str, type: str, data: bytes) -> None:
    page.driver.execute_script(script("bring"), kind, name, type, base64.b64encode(data).decode())


def heard(page: Page) -> dict[str, float]:
    return dict(page.js("window.heard"))


def test_a_picture_is_asked_about_and_answered_as_a_stream(page: Page, embedded_server: ServerProcess) -> None:
    page.open(embedded_server.url)
    page.type("files", str(SHAPES))
    page.wait_for("document.querySelector('#attached img')?.naturalWidth")
    answer = page.ask("What is in this picture?")
    assert "red circle" in answer and "blue square" in answer
    grown = page.js("window.grown")
    assert grown == sorted(grown) and grown[-1] == len(answer)
    assert re.search(r"first token \d.* · \d+ tokens in, \d+ out · \d+ steps: .*replayed", page.facts())
    assert "batch 1" in page.facts() and "vision encoder: 1 of 1" in page.facts()
    follow_up = page.ask("What color is the circle?")
    assert "red" in follow_up and "from the prefix cache" in page.facts() and "vision from the cache" in page.facts()
    assert page.js("document.querySelectorAll('#turns > li').length") == 4
    page.click("forget")
    assert page.js("document.querySelectorAll('#turns > li').length") == 0


def test_pictures_are_pasted_and_videos_dropped(page: Page, embedded_server: ServerProcess) -> None:
    page.open(embedded_server.url)
    bring(page, "paste", "pasted.png", "image/png", encoded(picture(56, 56), "PNG"))
    bring(page, "drop", "dropped.mp4", "video/mp4", video(frames=8, rate=4))
    page.wait_for("document.querySelectorAll('#attached li').length === 2")
    assert page.ask("What is this?") and "vision encoder: 2 of 2" in page.facts()
    bring(page, "drop", "notes.txt", "text/plain", b"words")
    assert page.wait_shown("see-error") == "notes.txt is neither a picture nor a video."


def test_the_camera_gives_a_picture(page: Page, embedded_server: ServerProcess) -> None:
    page.open(embedded_server.url)
    page.click("camera")
    page.wait_for("document.getElementById('camera-view').videoWidth")
    page.click("camera-take")
    page.wait_for("document.querySelector('#attached img')?.naturalWidth > 100")
    assert page.js(
        "document.getElementById('camera-view').srcObject === null && !document.querySelector('dialog[open]')"
    )
    page.driver.find_element("css selector", "#attached .remove").click()
    assert page.js("document.querySelectorAll('#attached li').length") == 0


def test_an_answer_is_spoken_while_it_is_written_and_read_again(page: Page, embedded_server: ServerProcess) -> None:
    page.open(embedded_server.url)
    page.click("aloud")
    page.click("sample")
    page.wait_for("document.querySelector('.answer .aloud')?.textContent")
    assert heard(page)["peak"] > SILENCE and heard(page)["seconds"] > 0.1
    spoken = r"aloud: first audio .* of sound · real-time factor \d.* gaps? · \d+ steps?: .*(replayed|eager)"
    assert re.search(rf"{spoken} · batch \d[^·]*$", page.facts())
    assert "1 of 1" in page.facts() and page.text(".answer .words").startswith("I see")
    page.wait_for("document.querySelector('.hear').textContent === 'Hear it'")
    before = heard(page)["seconds"]
    page.driver.execute_script("document.querySelector('.answer .aloud').textContent = ''")
    page.driver.find_element("css selector", ".hear").click()
    page.wait_for("document.querySelector('.answer .aloud').textContent")
    assert heard(page)["seconds"] > before and "aloud: first audio" in page.facts()


def test_sound_begins_before_the_text_ends_and_both_are_stopped(page: Page) -> None:
    talker = FakeEngine()  # answers with the question and says 0.1 s for each segment
    with page.visiting(running_server(talking_catalog(), engine=talker.serve, fixed_voices="off")) as server:
        page.open(server.url)
        page.click("aloud")
        page.type("question", "!endless and it is heard from the first sentence on. \n")
        page.wait_for("window.heard.starts > 1")
        assert page.js("document.querySelector('.answer').ariaBusy") == "true"
        assert page.js("document.getElementById('stop-answer').checkVisibility()")
        page.click("stop-answer")
        page.wait_for("document.querySelector('.answer .facts').textContent === 'stopped'")
        page.wait_for("document.querySelector('.hear').textContent === 'Hear it'")
        page.wait_for("document.getElementById('ask').checkVisibility()")
        assert page.text(".answer .words").startswith("!endless")
        server.wait_idle()
        wait(lambda: talker.idle, what="the engine has nothing to do")


def test_a_text_is_heard_drawn_and_downloaded_in_every_format(page: Page, embedded_server: ServerProcess) -> None:
    page.open(embedded_server.url, "speak")
    page.type("text", "Good evening.")
    page.type("seed", "7")
    page.type("manner", "A calm voice")
    page.click("say")
    page.wait_for("!document.getElementById('download').hidden")
    played = heard(page)
    assert played["peak"] > SILENCE
    facts = page.text("#speech-facts")
    assert re.search(r"first audio .* of sound in .* real-time factor \d.* steps: .*replayed.* seed 7", facts)
    assert page.js("document.getElementById('waveform').ariaLabel").startswith("Waveform of ")
    drawn = "document.getElementById('waveform').getContext('2d').getImageData(0, 0, 200, 96).data"
    page.wait_for(f"new Set({drawn}).size > 4")
    page.click("again")
    page.wait_for(f"window.heard.starts === {2 * int(played['starts'])}")
    page.wait_for("!document.getElementById('download').hidden")
    for format in page.js("[...document.querySelectorAll('#format option')].map(({ value }) => value)"):
        page.driver.execute_script(f"document.getElementById('format').value = '{format}'")
        page.click("download")
        samples, rate = by_av(page.downloaded(f"speech.{format}"), format, PCM_RATE)
        assert np.abs(samples).max() > SILENCE
        assert len(samples) / rate == pytest.approx(played["seconds"], abs=0.2)  # codecs pad their frames
        page.wait_for("!document.getElementById('download').disabled")


def test_a_voice_is_cloned_from_the_microphone_with_consent(page: Page, embedded_server: ServerProcess) -> None:
    page.open(embedded_server.url, "speak")
    page.driver.find_element("css selector", "#clone summary").click()
    page.click("record")
    page.wait_for("parseInt(document.getElementById('record-state').textContent) >= 2")
    page.click("record")
    page.wait_for("!document.getElementById('clip-sound').hidden")
    page.type("clone-name", "Neighbour")
    page.click("keep")
    assert page.wait_shown("clone-error") == "A voice is kept only with the speaker's consent."
    page.click("consent")
    page.click("keep")
    page.wait_for("document.getElementById('voice').selectedOptions[0]?.textContent === 'Neighbour'")
    voices = httpx.get(f"{embedded_server.url}/v1/audio/voices").json()["data"]
    (kept,) = (voice for voice in voices if voice["type"] == "uploaded")
    assert kept["seconds"] > 1 and kept["consent"].startswith("The speaker agrees")
    page.type("text", "Hello.")
    page.click("say")
    page.wait_for("!document.getElementById('download').hidden")
    assert heard(page)["peak"] > SILENCE
    delete_voice(page)
    assert httpx.get(f"{embedded_server.url}/v1/audio/voices/{kept['id']}").status_code == 404


def delete_voice(page: Page) -> None:
    page.click("delete-voice")
    page.driver.switch_to.alert.accept()
    page.wait_for("document.getElementById('voice').value === 'default'")
    page.wait_for("document.activeElement.id === 'voice'")


def test_a_described_voice_is_kept(page: Page, embedded_server: ServerProcess) -> None:
    page.open(embedded_server.url, "speak")
    page.driver.find_element("css selector", "#design summary").click()
    keep = page.driver.find_element("css selector", "#design .keep")
    keep.click()
    page.wait_for("document.querySelector('#design .error').textContent === 'Say what the voice is like.'")
    page.type("design-words", "An old man with a hoarse, friendly voice")
    page.type("design-name", "Grandfather")
    page.type("design-seed", "7")
    keep.click()
    page.wait_for("document.getElementById('voice').selectedOptions[0]?.textContent === 'Grandfather'")
    assert page.text("#voice-about") == "An old man with a hoarse, friendly voice"
    page.type("text", "Hello.")
    page.click("say")
    page.wait_for("!document.getElementById('download').hidden")
    assert heard(page)["peak"] > SILENCE
    delete_voice(page)


def test_what_goes_wrong_is_said_in_words(page: Page, embedded_server: ServerProcess) -> None:
    page.open(embedded_server.url)
    bring(page, "paste", "fine.png", "image/png", encoded(picture(56, 56), "PNG"))
    bring(page, "paste", "broken.png", "image/png", b"no picture at all")
    page.wait_for("document.querySelectorAll('#attached li').length === 2")
    page.type("question", "What is this?\n")
    said = page.wait_shown("see-error")
    assert said.startswith("broken.png: ") and page.element("see-error").get_attribute("role") == "alert"
    # All of it can be sent again.
    assert page.element("question").get_attribute("value") == "What is this?"
    assert page.js("document.querySelectorAll('#attached li').length") == 2
    assert page.js("document.querySelectorAll('#turns li').length") == 0
    page.driver.find_elements("css selector", "#attached .remove")[1].click()
    assert page.ask("") and "vision" in page.facts()
    page.driver.find_element("css selector", "nav a[href='#speak']").click()
    page.click("say")
    assert page.wait_shown("speak-error") == "There is no text to speak."
    page.type("text", "Hello.")
    for field, value, said in (
        ("speed", "9", "Speed: must be at most 4."),
        ("speed", "0", "Speed: must be at least 0.25."),
        ("seed", "1.5", "Seed: must be an integer; a decimal number was given."),
    ):
        page.driver.execute_script("document.getElementById(arguments[0]).value = arguments[1]", field, value)
        page.click("say")
        page.wait_for(f"document.getElementById('speak-error').textContent === {said!r}")
        page.element(field).clear()
    page.driver.find_element("css selector", "#design summary").click()
    page.type("design-words", "An old man")
    page.type("design-name", "no_such_letters!")
    page.driver.find_element("css selector", "#design .keep").click()
    page.wait_for("document.querySelector('#design .error').textContent.startsWith('Name: ')")
    assert any("400" in complaint for complaint in page.complaints())  # the browser's own note of the refusal


def test_load_latencies_and_caches_are_drawn(page: Page, embedded_server: ServerProcess) -> None:
    page.open(embedded_server.url)
    page.ask("Who are you?")
    page.driver.find_element("css selector", "nav a[href='#watch']").click()
    page.wait_for("document.querySelectorAll('.hosted article').length === 3")
    assert "ready" in page.text("#overview") and "CPU" in page.text("#overview")
    body = {"model": "reprise/qwen2_vl", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8}
    assert httpx.post(f"{embedded_server.url}/v1/chat/completions", json=body, timeout=GENEROUS).status_code == 200
    page.wait_for(
        "[...document.querySelectorAll('.line0')].filter((line) => /L/.test(line.getAttribute('d'))).length > 4"
    )
    page.wait_for("/first token.*p50 [0-9.]+ m?s/.test(document.getElementById('plots').textContent)")
    history = f"{embedded_server.url}/metrics/history"
    wait(lambda: len(httpx.get(history).json()) > 2, what="the server has kept readings")
    page.open(embedded_server.url, "watch")  # readings begin before the models are known
    page.wait_for(PAST_DRAWN)
    page.wait_for("/Requests, last minute[1-9]/.test(document.getElementById('overview').textContent)")
    page.wait_for("document.getElementById('plots').textContent.includes('Time to first audio')")


def test_it_is_used_by_keyboard_alone(page: Page, embedded_server: ServerProcess) -> None:
    page.open(embedded_server.url, view="")
    page.driver.execute_script("document.activeElement.blur()")
    seen = []
    for _ in range(12):
        page.driver.switch_to.active_element.send_keys("\ue004")  # Tab
        focused = page.driver.switch_to.active_element
        seen.append(focused.accessible_name)
    names = ["Skip to the content", "Reprise", "See", "Speak", "Watch", "Try it with a drawing", "Your question"]
    assert seen[: len(names)] == names and {"Picture or video", "Camera", "Aloud", "Ask"} <= set(seen)
    page.element("question").send_keys("Hello")
    page.driver.find_element("css selector", "nav a[href='#speak']").send_keys("\n")
    page.wait_for("document.activeElement.id === 'speak-title'")
    long = "This goes on and on and nobody will hear the end of it. " * 50
    page.driver.execute_script("document.getElementById('text').value = arguments[0]", long)
    page.element("say").send_keys("\n")
    page.wait_for("document.activeElement.id === 'stop-speech'")
    page.driver.switch_to.active_element.send_keys("\n")
    page.wait_for("document.activeElement.id === 'say'")


def test_a_new_conversation_has_nothing_of_an_answer_that_it_ended(page: Page) -> None:
    with page.visiting(running_server()) as server:
        page.open(server.url)
        page.driver.execute_script(SENT)
        bring(page, "paste", "drawn.png", "image/png", encoded(picture(56, 56), "PNG"))
        page.wait_for("document.querySelectorAll('#attached li').length")
        page.type("question", "!endless stream\n")
        page.wait_for("window.grown.length > 3")
        page.click("forget")
        page.wait_for("document.getElementById('ask').checkVisibility()")
        assert page.js("document.querySelectorAll('#turns li, #attached li').length") == 0
        assert page.element("question").get_attribute("value") == "" and page.element("welcome").is_displayed()
        assert page.ask("Hello?")
        assert [message["role"] for message in page.js("window.sent.at(-1).messages")] == ["user"]


def test_speech_is_stopped(page: Page, embedded_server: ServerProcess) -> None:
    """Through a line on which the whole would take longer than a test may."""
    page.open(embedded_server.url, "speak")
    long = "This goes on and on and nobody will hear the end of it. " * 1000
    page.driver.execute_script("document.getElementById('text').value = arguments[0]", long)
    with page.slow_line(bytes_per_second=50_000):
        page.click("say")
        page.wait_for("window.heard.starts > 0")
        starts = heard(page)["starts"]
        page.driver.execute_script(SPEAK_AGAIN)
        page.wait_for(f"window.heard.starts > {starts + 1}")
        assert page.text("#speech-facts") == "" and not page.element("say").is_displayed()
        page.click("stop-speech")
        page.wait_for("document.getElementById('say').checkVisibility()")
        assert page.text("#speech-facts") == "stopped"
        starts = heard(page)["starts"]
        wait(lambda: idle(embedded_server.url), what="the engine has dropped the speech")
        assert heard(page)["starts"] == starts


def idle(url: str) -> bool:
    text = httpx.get(f"{url}/metrics").text
    running = re.findall(r"^reprise_requests_running\{.*\} (\S+)", text, re.M)
    return len(running) == 3 and not any(map(float, running))


def test_a_key_of_any_letters_is_asked_for_and_stays_in_the_tab(page: Page, tmp_path: Path) -> None:
    with page.visiting(served("--api-key", "schlüssel-ключ", HOME=str(tmp_path))) as server:
        page.load(server.url)
        page.wait_for("document.getElementById('key-dialog').open")
        assert page.text("#key-problem") == "This server asks for a key."
        page.type("key", "schlüssel…\n")
        page.wait_for("document.getElementById('key-problem').textContent === 'The server does not know this key.'")
        page.wait_for("document.getElementById('key-dialog').open")
        page.click("key-cancel")
        page.wait_for("document.getElementById('state').textContent === 'This server needs an API key.'")
        page.click("key-again")
        page.wait_for("document.getElementById('key-dialog').open")
        page.type("key", "schlüssel-ключ\n")
        page.wait_for("document.querySelectorAll('#voice option').length")
        assert page.ask("Hello")
        kept = str(page.js("[{ ...localStorage }, document.cookie, location.href]"))
        assert "ssel-" not in kept, "also where letters are percent-encoded"
        first = page.driver.current_window_handle
        page.driver.switch_to.new_window("tab")
        page.load(server.url)
        page.wait_for("document.getElementById('key-dialog').open")
        page.driver.close()
        page.driver.switch_to.window(first)
        assert [complaint for complaint in page.complaints() if "401" not in complaint] == []


def test_an_answer_that_breaks_off_and_a_lost_server_are_named(page: Page) -> None:
    with running_server() as server:
        page.open(server.url)
        page.driver.execute_script(FORGET_TIMERS)
        page.type("question", "!endless stream\n")
        page.wait_for("window.grown.length > 3")
    assert page.wait_shown("see-error") == "The connection broke off before the answer was complete."
    page.wait_for("document.querySelector('.answer .facts').textContent === 'broken off'")
    page.wait_for("document.getElementById('state').dataset.good === 'false'")
    page.type("question", "Hello?\n")
    page.wait_for(f"document.getElementById('see-error').textContent === '{LOST}'")
    assert page.text("#state") == LOST
    page.driver.get("about:blank")  # it looks for the server again and again
    assert page.complaints()  # the browser's own notes of the lost connection
