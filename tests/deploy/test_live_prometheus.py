"""Dashboards and rules in a real Prometheus that scrapes the real server under load."""

from __future__ import annotations

import contextlib
import math
import re
import shutil
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from deploy.grafana.build import VARIABLES
from tests.deploy.promql import (
    DEPLOY,
    expressions,
    grouping_in,
    metrics_in,
    queries,
    recorded,
    rules,
    selectors_in,
)
from tests.media.samples import sound, tone
from tests.support.ports import free_port
from tests.support.processes import served
from tests.support.victims import CHAT, SMALL, SPEECH, chat, data_url, image_part, long_speech, speech, video_part

SCRAPE = "1s"
WINDOW = "30s"
"""Stands for Grafana's $__rate_interval."""
TURNS = 3
"""Of each client, before anything is asked."""
SCRAPES_SECONDS = 4.0
IN_FLIGHT = 6
"""Requests that the server takes at once; the load is now and then more."""
TARGET_LABELS = {"instance", "job"}
NOT_IN_A_HEALTHY_RUN = {
    "reprise_gpu_memory_bytes": "there is no GPU",
    "reprise_speech_rejections_total": "a CPU has no target for the first audio, by which speech is refused",
}
"""Metrics that need not be there, and why."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(170)]


class Load:
    """Clients that ask and listen, each its own thing, until stopped."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._over = threading.Event()
        self._clip = data_url(sound(tone(220, 16_000, 1.5), 16_000, "WAV"), "audio/wav")
        self.problems: list[str] = []
        kinds = [self._picture, self._moving, self._streamed, self._spoken, self._clipped, self._leaving, self._crowd]
        self._done = {kind.__name__: 0 for kind in kinds}
        self._threads = [threading.Thread(target=self._repeat, args=(kind,)) for kind in kinds]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)

    def wait(self) -> None:
        """Until all have been served a few times, and that has been scraped."""
        deadline = time.monotonic() + 60
        while min(self._done.values()) < TURNS:
            assert time.monotonic() < deadline and not self.problems, (self._done, self.problems)
            time.sleep(0.2)
        time.sleep(SCRAPES_SECONDS)

    def _repeat(self, kind: Callable[[int], int]) -> None:
        turn = 0
        while not self._over.is_set():
            try:
                status = kind(turn)
            except httpx.HTTPError as error:
                self.problems.append(f"{kind.__name__}: {error!r}")
            else:
                if status not in (200, 503):
                    self.problems.append(f"{kind.__name__}: {status}")
                self._done[kind.__name__] += status == 200
            turn += 1
            time.sleep(0.2)

    def _post(self, path: str, body: dict[str, Any]) -> int:
        return httpx.post(self._url + path, json=body, timeout=60).status_code

    def _ask(self, *media: dict[str, Any], **fields: Any) -> int:
        return self._post("/v1/chat/completions", chat("What is it?", *media, tokens=16, **fields))

    def _picture(self, turn: int) -> int:
        """Each picture twice, behind another text: cached is then its embedding, not the prompt's prefix."""
        content = [{"type": "text", "text": f"Number {turn}."}, image_part(seed=turn // 2)]
        return self._ask(messages=[{"role": "user", "content": content}])

    def _moving(self, turn: int) -> int:
        return self._ask(video_part())

    def _streamed(self, turn: int) -> int:
        return self._ask(stream=True)

    def _spoken(self, turn: int) -> int:
        return self._post("/v1/audio/speech", speech())

    def _clipped(self, turn: int) -> int:
        return self._post("/v1/audio/speech", speech(ref_audio=self._clip, response_format="mp3"))

    def _leaving(self, turn: int) -> int:
        with httpx.stream("POST", self._url + "/v1/audio/speech", json=long_speech(), timeout=60) as response:
            next(response.iter_bytes(), b"")
            return response.status_code

    def _crowd(self, turn: int) -> int:
        """More at once than is taken, and a picture that is none."""
        broken = {"type": "image_url", "image_url": {"url": data_url(b"no picture")}}
        assert self._ask(broken) in (400, 503)
        crowd = [threading.Thread(target=self._ask) for _ in range(IN_FLIGHT + 2)]
        for client in crowd:
            client.start()
        for client in crowd:
            client.join()
        return 200


class Prometheus:
    def __init__(self, url: str) -> None:
        self._http = httpx.Client(base_url=f"{url}/api/v1", timeout=20)

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
def scraping(server: str, folder: Path) -> Iterator[Prometheus]:
    """Prometheus with the repository's own configuration, but for the addresses and the pace."""
    program = shutil.which("prometheus")
    assert program, "prometheus is not installed; `make test-all` says how"
    address = f"127.0.0.1:{free_port()}"
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())
    config["global"] = {"scrape_interval": SCRAPE, "evaluation_interval": SCRAPE}
    targets = {"reprise": server.removeprefix("http://"), "prometheus": address}
    for job in config["scrape_configs"]:
        job["static_configs"] = [{"targets": [targets[job["job_name"]]]}]
    shutil.copytree(DEPLOY / "prometheus/rules", folder / "rules")
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [
                program, f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
                f"--web.listen-address={address}",
            ],
            stdout=log,
            stderr=log,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 20
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"http://{address}/-/ready").status_code == 200:
                    break
            assert time.monotonic() < deadline and process.poll() is None, (folder / "log").read_text()
            time.sleep(0.1)
        yield Prometheus(f"http://{address}")
    finally:
        process.terminate()
        process.wait(20)


def plain(expression: str) -> str:
    """A panel's expression with Grafana's variables filled in."""
    filled = expression.replace("$__rate_interval", WINDOW)
    for variable in VARIABLES:
        filled = filled.replace(f"${variable}", ".*")
    assert "$" not in filled, f"an unknown variable: {expression}"
    return filled


def without_threshold(alert: str) -> str:
    """What an alert compares: there is such data though nothing is wrong."""
    return re.sub(r"\s(?:==|>|<)\s[\d.]+", "", alert)


def excused(expression: str) -> bool:
    return any(name in NOT_IN_A_HEALTHY_RUN for name in metrics_in(expression))


def test_every_expression_returns_data_under_load(tmp_path: Path) -> None:
    limits = ("--max-in-flight", str(IN_FLIGHT), "--voices-dir", str(tmp_path / "voices"))
    with served(*SMALL, *limits) as server, scraping(server.url, tmp_path) as prometheus:
        with Load(server.url) as load:
            load.wait()
            problems = list(_problems(server.url, prometheus))
        assert not load.problems, load.problems
        assert not problems, "\n".join(problems)


def _problems(url: str, prometheus: Prometheus) -> Iterator[str]:
    yield from _unknown_names(httpx.get(f"{url}/metrics").text)
    for rule in rules():
        name = rule.get("record") or rule["alert"]
        prometheus.values(rule["expr"])
        asked = rule["record"] if "record" in rule else without_threshold(rule["expr"])
        if not prometheus.values(asked) and not excused(rule["expr"]) and "absent(" not in asked:
            yield f"rule {name}: no data in {asked}"
    for where, expression in queries():
        if not prometheus.values(plain(expression)) and not excused(expression):
            yield f"{where}: no data in {plain(expression)}"
    expected = {"model": sorted((CHAT, SPEECH)), "instance": [url.removeprefix("http://")]}
    for variable, (_, query) in VARIABLES.items():
        metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", query).groups()  # type: ignore[union-attr]
        values = prometheus.get(f"/label/{label}/values", **{"match[]": metric})
        if values != expected[variable]:
            yield f"the variable ${variable} has the values {values}"
    loaded = [rule for group in prometheus.get("/rules")["groups"] for rule in group["rules"]]
    yield from (f"rule {rule['name']}: {rule}" for rule in loaded if rule.get("lastError") or rule["health"] != "ok")
    if {rule["name"] for rule in loaded} != {rule.get("record") or rule["alert"] for rule in rules()}:
        yield f"Prometheus loaded only {loaded}"


def _unknown_names(scrape: str) -> Iterator[str]:
    live: defaultdict[str, set[str]] = defaultdict(set)
    for family in text_string_to_metric_families(scrape):
        for sample in family.samples:
            live[sample.name] |= set(sample.labels)
    live["up"] = set()
    for where, expression in expressions():
        used = metrics_in(expression)
        for name in set(used) - live.keys() - recorded() - NOT_IN_A_HEALTHY_RUN.keys():
            yield f"{where}: a live scrape has no {name}"
        for name, labels in selectors_in(expression):
            if name in live and not labels <= live[name] | TARGET_LABELS:
                yield f"{where}: {name} has the labels {live[name]}"
        if live.keys() >= set(used):
            have = set().union(*(live[name] for name in used))
            if not grouping_in(expression) <= have | TARGET_LABELS:
                yield f"{where}: grouped by what is no label"
