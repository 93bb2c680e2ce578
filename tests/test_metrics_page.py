"""One page of metrics from the registries of several processes."""

from __future__ import annotations

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from service.metrics.metrics import Metrics
from service.metrics.page import Families, families, lasting, merged, text


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
