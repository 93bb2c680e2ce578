"""Debian's Chromium without a screen, with a camera and a microphone that are files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

import pytest

from tests.support.optional import needed
from tests.support.waiting import GENEROUS, wait

if TYPE_CHECKING:
    from selenium.webdriver import Chrome
    from selenium.webdriver.remote.webelement import WebElement

Server = TypeVar("Server")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage"),
    *("--window-size=1200,900", "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"),
)
ATTEMPTS = 3
NEW_LINE = "\ue008\ue007\ue000"
"""Shift and Enter."""


def script(name: str) -> str:
    """A script of this folder, for the page."""
    return Path(__file__).with_name(f"{name}.js").read_text()


class Page:
    """The page in a browser. Conditions are waited for, never times."""

    def __init__(self, driver: Chrome, downloads: Path) -> None:
        self.driver = driver
        self.downloads = downloads

    def open(self, url: str, view: str = "see") -> None:
        """Loads the page anew and waits for the models. Where the address names no view, it is the first."""
        self.load(url, view)
        self.wait_for("document.getElementById('state').textContent === 'Ready'")
        self.wait_for("document.getElementById('speak-model').textContent")
        self.wait_for("document.querySelector('#voice option') || document.getElementById('say').disabled")

    def load(self, url: str, view: str = "see") -> None:
        self.driver.get("about:blank")
        self.driver.get(f"{url}/#{view}" if view else f"{url}/")

    @contextmanager
    def visiting(self, server: AbstractContextManager[Server]) -> Iterator[Server]:
        """A server of the test's own. The page, which looks after its server now and then, leaves it before its end: it
        would complain that it is gone."""
        with server as running:
            yield running
            self.driver.get("about:blank")

    def js(self, expression: str) -> Any:
        return self.driver.execute_script(f"return {expression}")

    def wait_for(self, expression: str, seconds: float = 2 * GENEROUS) -> None:
        wait(lambda: bool(self.js(expression)), seconds, expression)

    def hold_timers(self) -> None:
        """What is shown for a moment (service/page/copy.js) stays until the page is loaded anew: a busy machine looks
        too late."""
        self.driver.execute_script(
            "const begin = window.setTimeout;"
            "window.setTimeout = (work, delay, ...rest) => delay === 1500 ? 0 : begin(work, delay, ...rest);"
        )

    def element(self, id: str) -> WebElement:
        return self.driver.find_element("id", id)

    def click(self, id: str) -> None:
        self.wait_for(f"document.getElementById('{id}').checkVisibility()")
        self.element(id).click()

    def type(self, id: str, text: str) -> None:
        self.element(id).send_keys(text)

    def text(self, selector: str) -> str:
        return str(self.js(f"document.querySelector({selector!r})?.textContent ?? ''"))

    def wait_shown(self, id: str) -> str:
        """The text of an element that appears."""
        self.wait_for(f"!document.getElementById('{id}').hidden")
        return self.text(f"#{id}")

    def ask(self, question: str) -> str:
        """The whole answer to a question, asked by the keyboard."""
        complete = "document.querySelectorAll('.answer:not([aria-busy]) .actions .copy').length"
        before = int(self.js(complete))
        self.type("question", question.replace("\n", NEW_LINE) + "\n")
        self.wait_for(f"{complete} > {before}")
        return str(self.js("[...document.querySelectorAll('.answer .words')].at(-1).textContent"))

    def facts(self) -> str:
        """The line below the newest answer."""
        return str(self.js("[...document.querySelectorAll('.answer .facts')].at(-1).textContent"))

    def downloaded(self, name: str) -> bytes:
        """The complete file that the browser has saved under this name; it is removed."""
        path = self.downloads / name
        wait(lambda: path.exists() and not list(self.downloads.glob("*.crdownload")), what=f"{name} was downloaded")
        data = path.read_bytes()
        path.unlink()
        return data

    @contextmanager
    def slow_line(self, bytes_per_second: int) -> Iterator[None]:
        """Everything that the browser receives comes at most so fast."""
        unlimited = {"offline": False, "latency": 0, "uploadThroughput": -1, "downloadThroughput": -1}
        limited = {**unlimited, "downloadThroughput": bytes_per_second}
        self.driver.execute_cdp_cmd("Network.enable", {})
        self.driver.execute_cdp_cmd("Network.emulateNetworkConditions", limited)
        try:
            yield
        finally:
            self.driver.execute_cdp_cmd("Network.emulateNetworkConditions", unlimited)

    def complaints(self) -> list[str]:
        """What the browser's console has said since the last call: errors of scripts, refusals of the policy."""
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]


@contextmanager
def chromium(folder: Path, microphone: Path) -> Iterator[Page]:
    """A fresh profile in `folder`. In CI a missing browser is a failure, elsewhere the test is skipped."""
    webdriver = needed("selenium.webdriver")
    found = {name: shutil.which(name) for name in ("chromium", "chromedriver")}
    if not os.environ.get("CI") and None in found.values():
        pytest.skip("needs Debian's chromium and chromium-driver")
    assert None not in found.values(), f"missing: {found}"
    options = webdriver.ChromeOptions()
    options.binary_location = found["chromium"]
    for flag in (*FLAGS, f"--user-data-dir={folder / 'profile'}", f"--use-file-for-fake-audio-capture={microphone}"):
        options.add_argument(flag)
    downloads = folder / "downloads"
    downloads.mkdir()
    options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = started(webdriver, options, str(found["chromedriver"]))
    try:
        driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": script("listen")})
        yield Page(driver, downloads)
    finally:
        driver.quit()


def started(webdriver: ModuleType, options: Any, driver: str) -> Chrome:
    """The driver gives its browser a minute to start, which is little on a machine that is busy with other work."""
    refused = needed("selenium.common.exceptions").SessionNotCreatedException
    for _ in range(ATTEMPTS - 1):
        with suppress(refused):
            return webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
