"""What several engines tell is told apart by a label; what is measured elsewhere is not."""

from __future__ import annotations

import re
from pathlib import Path

from service.link.messages import EngineState, ModelState
from service.metrics.metrics import OF_ENGINES, SPECS, Metrics
from service.metrics.page import families, labelled, merged, text, without_engines

ROOT = Path(__file__).parents[1]
ENGINE_SIDE = ("service/engine", "service/graphs", "models")


def told_in_engines() -> set[str]:
    """Names of metrics that the engine's code counts or observes."""
    found: set[str] = set()
    names = {spec.name for spec in SPECS}
    for folder in ENGINE_SIDE:
        for file in (ROOT / folder).rglob("*.py"):
            found |= set(re.findall(r"\"(\w+_\w+)\"", file.read_text())) & names
    return found | {"encoder_cache_hits_total", "encoder_cache_misses_total"}  # composed names


def test_every_metric_of_the_engine_has_the_label() -> None:
    assert told_in_engines() - OF_ENGINES == set()


def test_what_only_a_process_that_answers_clients_tells_has_none() -> None:
    files = (ROOT / "service/api").rglob("*.py")
    text = " ".join(file.read_text() for file in files if file.name != "engine_client.py")  # the supervisor has it, too
    observed = set(re.findall(r"observe(?:_often)?\(\s*\"(\w+)\"", text))
    assert observed & OF_ENGINES == {"engine_up"}  # of the only engine


def test_the_page_has_each_engine_once() -> None:
    api, engines = Metrics({"a": "chat"}), [Metrics({"a": "chat"}) for _ in range(2)]
    api.observe("requests_total", model="a", endpoint="chat", status="200", outcome="ok")
    for running, metrics in enumerate(engines, 1):
        metrics.observe_state(EngineState("ready", "", (ModelState("a", running, 0, running, 10, 5, 0),), 0))
        metrics.observe("preemptions_total", running, model="a")
    parts = [labelled(metrics.registry, index) for index, metrics in enumerate(engines)]
    page = text(merged([without_engines(families(api.registry)), *parts])).decode().splitlines()
    assert 'reprise_requests_running{engine="0",model="a"} 1.0' in page
    assert 'reprise_requests_running{engine="1",model="a"} 2.0' in page
    assert 'reprise_preemptions_total{engine="1",model="a"} 2.0' in page
    assert not [line for line in page if line.startswith(("reprise_preemptions_total{model", "reprise_slots_used{m"))]
    assert sum(line.startswith("reprise_requests_total{") for line in page) == 1
    assert sum(line.startswith("process_cpu_seconds_total ") for line in page) == 1
