"""What the page's view Watch shows from before it was opened."""

from __future__ import annotations

import re

import httpx

from service.metrics.metrics import PREFIX, SPECS
from service.metrics.page import WATCHED
from tests.support.processes import ROOT
from tests.support.servers import running_server
from tests.support.waiting import GENEROUS, wait


def test_requests_from_before_the_page_was_opened_are_counted() -> None:
    with running_server() as server:
        url = f"{server.url}/metrics/history"
        wait(lambda: len(httpx.get(url).json()) > 0, GENEROUS, "the first reading, at the start")
        (first, *_) = httpx.get(url).json()
        assert first["age"] >= 0 and f"{PREFIX}_requests_running" in first["metrics"]
        named = set(re.findall(rf"^{PREFIX}_(\w+)", first["metrics"], re.MULTILINE))
        assert named <= set(WATCHED), "no others"


def test_all_that_the_page_draws_is_kept() -> None:
    watch = (ROOT / "service/page/watch.js").read_text()
    plots = watch[watch.index("const PLOTS") : watch.index("let readings")]
    drawn = {spec.name for spec in SPECS if f'"{spec.name}"' in plots}
    kept = {name.removesuffix("_bucket") for name in WATCHED}
    assert drawn and drawn <= kept and kept <= {spec.name for spec in SPECS}
