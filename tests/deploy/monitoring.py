"""Prometheus and Alertmanager as the repository configures them, but for addresses and pace."""

from __future__ import annotations

import contextlib
import math
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml

from benchmarks.servers.ports import reserved_port
from tests.deploy.promql import DEPLOY
from tests.support.waiting import GENEROUS

PACE = "1s"
"""Between two scrapes, and until Alertmanager tells of a new group of alerts."""


class Prometheus:
    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=f"{url}/api/v1", timeout=GENEROUS)

    def get(self, path: str, **parameters: str) -> Any:
        """`data` of an answer; AssertionError with Prometheus' own words when it is an error."""
        answer = self._http.get(path, params=parameters).json()
        assert answer["status"] == "success", f"{parameters}: {answer.get('error')}"
        return answer["data"]

    def values(self, expression: str) -> list[float]:
        """Of an instant query; what is not a number is left out."""
        values = [float(sample["value"][1]) for sample in self.get("/query", query=expression)["result"]]
        return [value for value in values if not math.isnan(value)]


@contextlib.contextmanager
def scraping(server: str, folder: Path, alertmanager: str = "", **labels: str) -> Iterator[Prometheus]:
    """Prometheus that scrapes the server, and tells the Alertmanager at the address, if there is one. labels: of all
    targets."""
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    config["global"] = {"scrape_interval": PACE, "evaluation_interval": PACE}
    config["alerting"]["alertmanagers"][0]["static_configs"] = [{"targets": [alertmanager] if alertmanager else []}]
    shutil.copytree(DEPLOY / "prometheus/rules", folder / "rules")
    options = (f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data")
    with reserved_port() as port:
        address = f"127.0.0.1:{port}"
        targets = {"reprise": server.removeprefix("http://"), "prometheus": address}
        for job in config["scrape_configs"]:
            job["static_configs"] = [{"targets": [targets[job["job_name"]]], "labels": labels}]
        (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
        with _running(address, folder / "prometheus.log", "prometheus", *options):
            yield Prometheus(f"http://{address}")


@contextlib.contextmanager
def _running(address: str, log: Path, program: str, *options: str) -> Iterator[None]:
    found = shutil.which(program)
    assert found, f"{program} is not installed; `make test-all` says how"
    with log.open("w") as output:
        process = subprocess.Popen([found, f"--web.listen-address={address}", *options], stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + GENEROUS
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"http://{address}/-/ready").status_code == 200:
                    break
            assert time.monotonic() < deadline and process.poll() is None, log.read_text()
            time.sleep(0.1)
        yield
    finally:
        process.terminate()
        process.wait(GENEROUS)
