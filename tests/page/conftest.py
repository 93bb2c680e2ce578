"""One browser and one server for all tests of the page."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from tests.media.samples import sound
from tests.models.qwen3_asr.golden import samples
from tests.page.browser import Page, chromium
from tests.support.processes import ServerProcess, served


@pytest.fixture(scope="package")
def embedded_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One whose caches have seen nothing that other tests asked."""
    with served("--max-frames", "16", HOME=str(tmp_path_factory.mktemp("home"))) as running:
        yield running


@pytest.fixture(scope="package")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    folder = tmp_path_factory.mktemp("browser")
    microphone = folder / "microphone.wav"
    microphone.write_bytes(sound(np.append(samples("speech"), np.zeros(32_000)), 16_000, "WAV"))
    with chromium(folder, microphone) as page:
        yield page


@pytest.fixture
def page(browser: Page) -> Iterator[Page]:
    """Ends without a complaint of the browser, unless the test has read those that it expected."""
    browser.driver.get("about:blank")  # or the page of the last test goes on looking for its server
    browser.complaints()
    yield browser
    assert browser.complaints() == []
