"""Metrics: names, labels, what observations make of them, and one page from several processes and engines."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from service.link.messages import EngineState, ModelState, ProcessUsage
from service.metrics.metrics import OF_ENGINES, PREFIX, SPECS, Metrics
from service.metrics.page import Families, families, labelled, lasting, merged, text, without_engines

UNITS = ("_seconds", "_bytes", "_ratio", "_total", "_tokens", "_pages", "_info", "_factor")
COUNTS = (
    *("request_images", "request_video_frames", "requests_running", "requests_waiting", "slots_used"),
    *("state_snapshots", "event_loop_tasks", "engine_threads", "graph_captures_left"),
)
STATES = ("ready", "engine_up", "http_requests_in_progress")


def test_names_follow_the_guide() -> None:
    names = [spec.name for spec in SPECS]
    assert len(names) == len(set(names))
    for spec in SPECS:
        assert re.fullmatch(r"[a-z][a-z0-9_]*", spec.name)
        assert (spec.kind == "counter") == spec.name.endswith("_total"), spec.name
        assert spec.name.endswith(UNITS) or spec.name in COUNTS + STATES, spec.name
        assert spec.help.endswith("."), spec.name
        assert (spec.kind == "histogram") == bool(spec.buckets), spec.name
        assert list(spec.buckets) == sorted(set(spec.buckets)), spec.name


def test_observe_adds_to_counters_sets_gauges_and_fills_histograms() -> None:
    metrics = Metrics()
    metrics.observe("generated_tokens_total", 3, model="m")
    metrics.observe("generated_tokens_total", model="m")
    metrics.observe("ready", 1)
    metrics.observe("queue_duration_seconds", 0.004, model="m")
    text = metrics.exposition().decode()
    assert 'reprise_generated_tokens_total{model="m"} 4.0' in text
    assert "reprise_ready 1.0" in text
    assert 'reprise_queue_duration_seconds_bucket{le="0.005",model="m"} 1.0' in text
    assert 'reprise_queue_duration_seconds_bucket{le="0.0025",model="m"} 0.0' in text
    assert "process_resident_memory_bytes" in text


def test_a_value_observed_often_counts_so_many_times() -> None:
    once, often = Metrics(), Metrics()
    for value in (0.001, 0.0024, 0.0025, 31.0):  # at a border, inside, at the next border, above all
        often.observe_often("queue_duration_seconds", value, 3, model="m")
        for _ in range(3):
            once._metrics["queue_duration_seconds"].labels("m").observe(value)

    def lines(metrics: Metrics) -> list[str]:
        text = metrics.exposition().decode()
        return re.findall(r"^reprise_queue_duration_seconds_(?:bucket|sum|count).*", text, re.M)

    assert lines(often) == lines(once)
    assert 'reprise_queue_duration_seconds_count{model="m"} 12.0' in lines(often)


def test_counters_of_hosted_models_begin_at_zero() -> None:
    text = Metrics({"m": "chat", "s": "speech"}).exposition().decode()
    assert 'reprise_preemptions_total{model="m"} 0.0' in text
    assert 'reprise_encoder_cache_hits_total{model="m"} 0.0' in text
    assert 'reprise_audio_streams_total{model="s",underrun="true"} 0.0' in text
    assert 'reprise_audio_streams_total{model="m"' not in text
    assert 'reprise_admission_rejections_total{endpoint="chat",reason="in_flight"} 0.0' in text


def test_labels_are_of_low_cardinality() -> None:
    allowed = {
        *("model", "endpoint", "status", "outcome", "reason", "kind", "route", "state", "format", "underrun", "part"),
        *("version", "python", "torch", "device", "phase", "cached", "kernel"),
    }
    assert {label for spec in SPECS for label in spec.labels} <= allowed


def shown(metrics: Metrics, *lines: str) -> bool:
    text = metrics.exposition().decode()
    return all(f"{PREFIX}_{line}\n" in text for line in lines)


def test_the_heartbeat_sets_the_gauges_that_routers_scrape_and_what_ended_holds_nothing() -> None:
    metrics = Metrics()
    state = EngineState("ready", "", (ModelState("m", 2, 3, 100, 25, 10, 7),), 4096, {"tensors": 9}, "a GPU")
    metrics.observe_state(state)
    kept = 'kv_cache_pages{model="m",state="cached"} 10.0', 'encoder_cache_bytes{model="m"} 7.0'
    assert shown(metrics, 'engine_info{device="a GPU"} 1.0', *kept)
    gauges = {
        'requests_running{model="m"}': 2.0,
        'requests_waiting{model="m"}': 3.0,
        'kv_cache_usage_ratio{model="m"}': 0.25,
        'gpu_memory_bytes{state="tensors"}': 9.0,
        "graph_bytes": 4096.0,
    }
    assert shown(metrics, *(f"{name} {value}" for name, value in gauges.items()))
    metrics.observe_end(state)
    assert shown(metrics, *(f"{name} 0.0" for name in gauges))


def _value(metrics: Metrics, name: str) -> float | None:
    return metrics.registry.get_sample_value(f"{PREFIX}_{name}")


def test_the_engine_process_is_counted_over_its_restarts() -> None:
    metrics = Metrics()
    for seconds in (2.0, 5.0):
        state = EngineState("ready", "", (), 0, process=ProcessUsage(seconds, 4096, 7))
        metrics.observe_state(state)
    assert _value(metrics, "engine_cpu_seconds_total") == 5
    assert _value(metrics, "engine_resident_memory_bytes") == 4096 and _value(metrics, "engine_threads") == 7
    metrics.observe_end(state)
    assert _value(metrics, "engine_cpu_seconds_total") == 5 and _value(metrics, "engine_threads") == 0
    metrics.observe_state(EngineState("ready", "", (), 0, process=ProcessUsage(1.5, 4096, 7)))
    assert _value(metrics, "engine_cpu_seconds_total") == 6.5


def of(**gauges: float) -> Metrics:
    metrics = Metrics({"m": "chat"})
    for name, value in gauges.items():
        metrics.observe(name, value)
    return metrics


def sent(metrics: Metrics) -> Families:
    """As it comes out of another process."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(families(metrics.registry)), type=Families)


def value(page: Families, name: str, **labels: str) -> float:
    found = [sample for family in page for sample in family.samples if (sample.name, sample.labels) == (name, labels)]
    assert len(found) == 1, f"{name} occurs {len(found)} times"
    return found[0].value


def test_one_process_alone_has_the_page_that_it_had() -> None:
    metrics = of(ready=1.0, event_loop_tasks=7)
    metrics.observe("queue_duration_seconds", 0.003, model="m")
    ours = {family.name: family for family in text_string_to_metric_families(text(sent(metrics)).decode())}
    plain = {family.name: family for family in text_string_to_metric_families(metrics.exposition().decode())}
    assert ours.keys() == plain.keys()
    for name, family in plain.items():
        if name.startswith("reprise_"):
            assert [tuple(sample) for sample in ours[name].samples] == [tuple(sample) for sample in family.samples]


def test_work_is_summed_and_states_are_those_of_any_process() -> None:
    one, other = of(ready=1.0, event_loop_tasks=3, admitted_bytes=5), of(ready=0.0, event_loop_tasks=4)
    for metrics, count in ((one, 2), (other, 3)):
        metrics.observe("generated_tokens_total", count, model="m")
        metrics.observe("build_info", 1, version="1", python="3", torch="2")
        for _ in range(count):
            metrics.observe("queue_duration_seconds", 0.003, model="m")
    page = merged([sent(one), sent(other)])
    assert value(page, "reprise_generated_tokens_total", model="m") == 5
    assert value(page, "reprise_queue_duration_seconds_count", model="m") == 5
    assert value(page, "reprise_queue_duration_seconds_bucket", model="m", le="0.003") == 5
    assert value(page, "reprise_event_loop_tasks") == 7 and value(page, "reprise_admitted_bytes") == 5
    assert value(page, "reprise_ready") == 1
    assert value(page, "reprise_build_info", version="1", python="3", torch="2") == 1
    assert value(page, "process_resident_memory_bytes") > 1.5 * value(sent(one), "process_resident_memory_bytes")
    assert value(page, "process_start_time_seconds") == value(sent(one), "process_start_time_seconds")


def test_of_a_process_that_has_ended_the_counts_remain_and_the_gauges_do_not() -> None:
    one, ended = of(ready=1.0, event_loop_tasks=3), of(ready=1.0, event_loop_tasks=4)
    for metrics in (one, ended):
        metrics.observe("generated_tokens_total", 2, model="m")
        metrics.observe("queue_duration_seconds", 0.003, model="m")
    page = merged([sent(one), lasting(sent(ended))])
    assert value(page, "reprise_generated_tokens_total", model="m") == 4
    assert value(page, "reprise_queue_duration_seconds_sum", model="m") == 0.006
    assert value(page, "reprise_event_loop_tasks") == 3


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
        metrics.observe_state(EngineState("ready", "", (ModelState("a", running, 0, 10, 5, 0),), 0))
        metrics.observe("preemptions_total", running, model="a")
    parts = [labelled(metrics.registry, index) for index, metrics in enumerate(engines)]
    page = text(merged([without_engines(families(api.registry)), *parts])).decode().splitlines()
    assert 'reprise_requests_running{engine="0",model="a"} 1.0' in page
    assert 'reprise_requests_running{engine="1",model="a"} 2.0' in page
    assert 'reprise_preemptions_total{engine="1",model="a"} 2.0' in page
    assert not [line for line in page if line.startswith(("reprise_preemptions_total{model", "reprise_slots_used{m"))]
    assert sum(line.startswith("reprise_requests_total{") for line in page) == 1
    assert sum(line.startswith("process_cpu_seconds_total ") for line in page) == 1
