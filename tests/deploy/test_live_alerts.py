"""A killed engine's alert, from the server through Prometheus and Alertmanager to a webhook on loopback."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from benchmarks.servers.footprint import engine_pid
from tests.deploy.monitoring import alerting, scraping
from tests.support.processes import served
from tests.support.victims import SMALL
from tests.support.waiting import GENEROUS, wait

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@contextmanager
def webhook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """(URL, the alerts that were posted to it so far)"""
    heard: list[dict[str, Any]] = []

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            heard.extend(json.loads(self.rfile.read(int(self.headers["content-length"])))["alerts"])
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        listener = threading.Thread(target=server.serve_forever)
        listener.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/alerts", heard
        finally:
            server.shutdown()
            listener.join()


def test_the_alert_of_a_killed_engine_reaches_a_webhook(tmp_path: Path) -> None:
    voices = ("--voices-dir", str(tmp_path / "voices"))
    with (
        webhook() as (url, heard),
        alerting(url, tmp_path) as alertmanager,
        served(*SMALL, *voices) as server,
        scraping(server.url, tmp_path, alertmanager) as prometheus,
    ):
        wait(lambda: prometheus.values("reprise_engine_restarts_total") == [0], GENEROUS, "a scrape before the fault")
        os.kill(engine_pid(server.process.pid), signal.SIGKILL)
        wait(lambda: bool(heard), 2 * GENEROUS, "the alert")
        (alert,) = heard
        assert alert["status"] == "firing" and alert["labels"] == {
            "alertname": "RepriseEngineRestarts",
            "severity": "warning",
            "instance": server.url.removeprefix("http://"),
            "job": "reprise",
        }
        assert alert["annotations"]["runbook"] == "docs/alerts.md#repriseenginerestarts"
