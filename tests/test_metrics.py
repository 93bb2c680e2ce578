"""Metrics: names, labels, and what observations make of them."""

from __future__ import annotations

import re

from service.link.messages import EngineState, ModelState, ProcessUsage
from service.metrics.metrics import PREFIX, SPECS, Metrics

UNITS = ("_seconds", "_bytes", "_ratio", "_total", "_tokens", "_pages", "_info", "_factor")
COUNTS = (
    *("request_images", "request_video_frames", "requests_running", "requests_waiting", "slots_used"),
    *("state_snapshots", "event_loop_tasks", "engine_threads", "graph_captures_left", "built_in_voices_left"),
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


def test_the_heartbeat_sets_the_gauges_that_routers_scrape() -> None:
    metrics = Metrics()
    metrics.observe_state(EngineState("ready", "", (ModelState("m", 2, 3, 2, 100, 25, 10, 7),), 4096))
    text = metrics.exposition().decode()
    for line in (
        *('requests_running{model="m"} 2.0', 'requests_waiting{model="m"} 3.0', 'kv_cache_usage_ratio{model="m"} 0.25'),
        *('kv_cache_pages{model="m",state="cached"} 10.0', 'encoder_cache_bytes{model="m"} 7.0', "graph_bytes 4096.0"),
    ):
        assert f"{PREFIX}_{line}" in text


def test_labels_are_of_low_cardinality() -> None:
    allowed = {
        *("model", "endpoint", "status", "outcome", "reason", "kind", "route", "state", "format", "underrun", "part"),
        *("version", "python", "torch", "device", "phase", "cached", "kernel"),
    }
    assert {label for spec in SPECS for label in spec.labels} <= allowed


def test_the_device_is_named_and_what_ended_holds_nothing() -> None:
    metrics = Metrics()
    state = EngineState("ready", "", (ModelState("m", 2, 3, 2, 100, 25, 10, 7),), 4096, {"tensors": 9}, "a GPU")
    metrics.observe_state(state)
    assert 'reprise_engine_info{device="a GPU"} 1.0' in metrics.exposition().decode()
    metrics.observe_end(state)
    text = metrics.exposition().decode()
    for line in (
        'requests_running{model="m"} 0.0',
        'requests_waiting{model="m"} 0.0',
        'kv_cache_usage_ratio{model="m"} 0.0',
        'gpu_memory_bytes{state="tensors"} 0.0',
        "graph_bytes 0.0",
    ):
        assert f"{PREFIX}_{line}" in text


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
