"""Dashboards and rules in a real Prometheus that scrapes the real server under load."""

from __future__ import annotations

import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from deploy.grafana.panels import VARIABLES
from tests.deploy.monitoring import Prometheus, scraping
from tests.deploy.promql import (
    annotations,
    captured,
    expressions,
    grouping_in,
    metrics_in,
    queries,
    rules,
    selectors_in,
    without_threshold,
)
from tests.media.samples import sound, tone
from tests.support.processes import served
from tests.support.victims import CHAT, SMALL, SPEECH, chat, data_url, image_part, long_speech, speech, video_part
from tests.support.waiting import GENEROUS, wait

WINDOW = "30s"
"""Stands for Grafana's $__rate_interval."""
TURNS = 3
"""Of each client, before anything is asked."""
SCRAPES_SECONDS = 4.0
ATTEMPTS = 100
"""At finding every expression's data: a busy machine scrapes late."""
IN_FLIGHT = 6
"""Requests that the server takes at once; the load is now and then more."""
TARGET_LABELS = {"instance", "job"}
NOT_IN_A_HEALTHY_RUN = {
    "reprise_gpu_memory_bytes": "there is no GPU",
    "reprise_kernel_fallbacks_total": "there is no GPU whose limits a kernel could exceed",
    "reprise_spoken_first_audio_seconds_bucket": "untrained weights say nothing that has a sound",
    "reprise_memory_retries_total": "there is no GPU whose memory could run out",
    "reprise_lora_loads_total": "no adapters are served",
    "reprise_speech_retries_total": "no speech runs away",
    "reprise_engine_wake_duration_seconds_bucket": "the engine does not sleep unless it is told to",
    "reprise_speech_rejections_total": "a CPU has no target for the first audio, by which speech is refused",
}
"""Metrics that need not be there, and why."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Load:
    """Clients that ask and listen, each its own thing, until stopped."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._over = threading.Event()
        self._clip = data_url(sound(tone(220, 16_000, 1.5), 16_000, "WAV"), "audio/wav")
        self.problems: list[str] = []
        kinds = [self._picture, self._moving, self._streamed, self._spoken, self._clipped, self._leaving, self._crowd]
        kinds += [self._calling]
        self._done = {kind.__name__: 0 for kind in kinds}
        self._threads = [threading.Thread(target=self._repeat, args=(kind,)) for kind in kinds]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(2 * GENEROUS)

    def wait(self) -> None:
        """Until all have been served a few times."""
        wait(lambda: min(self._done.values()) >= TURNS or bool(self.problems), 2 * GENEROUS, "each kind was served")
        assert not self.problems, self.problems

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
        return httpx.post(self._url + path, json=body, timeout=2 * GENEROUS).status_code

    def _ask(self, *media: dict[str, Any], **fields: Any) -> int:
        return self._post("/v1/chat/completions", chat("What is it?", *media, tokens=16, **fields))

    def _calling(self, turn: int) -> int:
        """An answer that has to be a call."""
        digit = {"type": "object", "properties": {"digit": {"enum": list(range(10))}}, "required": ["digit"]}
        tool = {"type": "function", "function": {"name": "press", "parameters": digit}}
        return self._ask(tools=[tool], tool_choice="required")

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
        with httpx.stream("POST", self._url + "/v1/audio/speech", json=long_speech(), timeout=2 * GENEROUS) as response:
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


def plain(expression: str) -> str:
    """A panel's expression with Grafana's variables filled in."""
    filled = expression.replace("$__rate_interval", WINDOW)
    for variable in VARIABLES:
        filled = filled.replace(f"${variable}", ".*")
    assert "$" not in filled, f"an unknown variable: {expression}"
    return filled


def excused(expression: str) -> bool:
    return any(name in NOT_IN_A_HEALTHY_RUN for name in metrics_in(expression))


def test_every_expression_returns_data_under_load(tmp_path: Path) -> None:
    limits = ("--max-in-flight", str(IN_FLIGHT), "--voices-dir", str(tmp_path / "voices"))
    with served(*SMALL, *limits) as server, scraping(server.url, tmp_path) as prometheus:
        with Load(server.url) as load:
            load.wait()
            for _ in range(ATTEMPTS):
                time.sleep(SCRAPES_SECONDS)
                if not (problems := list(_problems(server.url, prometheus))):
                    break
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
    for where, expression in annotations():
        prometheus.values(plain(expression))
        if not prometheus.values(without_threshold(plain(expression))) and not excused(expression):
            yield f"{where}: no data in {plain(expression)}"
    expected = {
        "model": sorted((CHAT, SPEECH)),
        "chat_model": [CHAT],
        "speech_model": [SPEECH],
        "instance": [url.removeprefix("http://")],
    }
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
        for name in set(used) - live.keys() - captured() - NOT_IN_A_HEALTHY_RUN.keys():
            yield f"{where}: a live scrape has no {name}"
        for name, labels in selectors_in(expression):
            if name in live and not labels <= live[name] | TARGET_LABELS:
                yield f"{where}: {name} has the labels {live[name]}"
        if live.keys() >= set(used):
            have = set().union(*(live[name] for name in used))
            if not grouping_in(expression) <= have | TARGET_LABELS:
                yield f"{where}: grouped by what is no label"
