"""Where the page puts things: shapes of pictures, right-to-left text, low and narrow windows, forced colours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.media.samples import encoded, picture
from tests.page.browser import Page
from tests.page.test_browser import bring
from tests.support.processes import ServerProcess
from tests.support.servers import RunningServer, running_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

HEBREW = "> ציטוט\n\n- פריט\n- item\n\n| שם | ערך |\n|---|---|\n| אלף | 1 |\n"


@pytest.fixture(scope="module")
def echo() -> Iterator[RunningServer]:
    """Answers with the question."""
    with running_server() as server:
        yield server


@contextmanager
def window(page: Page, width: int, height: int) -> Iterator[None]:
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": True}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        yield
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_pictures_beside_each_other_keep_their_shapes(page: Page, echo: RunningServer) -> None:
    page.open(echo.url)
    for name, width, height in (("tall.png", 100, 300), ("wide.png", 200, 100)):
        bring(page, "paste", name, "image/png", encoded(picture(width, height), "PNG"))
    page.wait_for("document.querySelectorAll('#attached li').length === 2")
    page.ask("What?")
    page.wait_for("[...document.querySelectorAll('.shown img')].every((image) => image.naturalWidth)")
    assert page.js("[...document.querySelectorAll('.shown img')].map(({ width, height }) => [width, height])") == [
        [85, 256],
        [200, 100],
    ]


def test_right_to_left_text_runs_so_and_stays_on_the_screen(page: Page, echo: RunningServer) -> None:
    with window(page, 360, 640):
        page.open(echo.url)
        page.driver.execute_script("document.getElementById('question').value = arguments[0]", HEBREW)
        assert page.js("getComputedStyle(document.getElementById('question')).direction") == "rtl"
        page.ask("")
        assert page.js("document.documentElement.scrollWidth <= innerWidth")
        styles = "[...document.querySelectorAll('.words :is(blockquote, li, table)')].map((e) => getComputedStyle(e))"
        assert page.js(f"{styles}.map(({{ direction }}) => direction)") == ["rtl", "rtl", "ltr", "rtl"]
        sides = "parseFloat(style.marginRight) - parseFloat(style.marginLeft)"
        assert page.js(f"{styles}.map((style) => Math.sign({sides}))") == [0, 1, -1, 0]


@pytest.mark.parametrize("width", [360, 1280])
def test_readings_fill_their_lines(page: Page, embedded_server: ServerProcess, width: int) -> None:
    with window(page, width, 800):
        page.open(embedded_server.url, "watch")
        page.wait_for("document.querySelectorAll('.tile').length === 6 && document.querySelector('.hosted dl')")
        boxes = "[...document.querySelectorAll('.tile')].map((tile) => tile.getBoundingClientRect())"
        ends = dict(page.js(f"{boxes}.map(({{ top, right }}) => [top, right])"))  # of the last one in each line
        assert max(ends.values()) - min(ends.values()) <= 1
        assert page.js("getComputedStyle(document.querySelector('.hosted dl')).gridTemplateColumns.includes(' ')")


def test_forced_colours_show_the_view_and_the_focus(page: Page, embedded_server: ServerProcess) -> None:
    forced = {"features": [{"name": "forced-colors", "value": "active"}]}
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", forced)
    try:
        page.open(embedded_server.url)
        page.type("question", "Hello")
        for shown in ("nav a[aria-current]", "#question"):
            outline = f"getComputedStyle(document.querySelector('{shown}'))"
            assert page.js(f"{outline}.outlineStyle") == "solid"
            assert page.js(f"{outline}.outlineColor") != "rgba(0, 0, 0, 0)"
    finally:
        page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
