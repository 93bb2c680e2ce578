"""One page of metrics from the registries of several processes, as plain values that can be sent between them.

The page at / also shows readings of the last five minutes (History).

Counters and histograms are summed, and so are gauges that count work or memory; METHODS lists the other ones.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import msgspec
from prometheus_client import generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from service.metrics.metrics import OF_ENGINES, PREFIX, SPECS, Metrics

_FAMILIES = frozenset(f"{PREFIX}_{name.removesuffix('_total')}" for name in OF_ENGINES)


def labelled(registry: CollectorRegistry, engine: int) -> Families:
    """The metrics of one of several engines."""
    return tuple(_with_label(family, engine) for family in families(registry) if family.name in _FAMILIES)


def without_engines(page: Families) -> Families:
    """The page of the other processes, without their empty metrics of engines."""
    return tuple(family for family in page if family.name not in _FAMILIES)


def _with_label(family: Family, engine: int) -> Family:
    samples = tuple(Sample(each.name, {"engine": str(engine), **each.labels}, each.value) for each in family.samples)
    return Family(family.name, family.kind, family.help, samples)


CREATED = "_created"
"""Suffix of the samples that say when a counter or histogram was created."""
OF_ANY_PROCESS = frozenset(f"{PREFIX}_{spec.name}" for spec in SPECS if spec.of_any_process)
METHODS: dict[str, Callable[[float, float], float]] = {
    **dict.fromkeys(OF_ANY_PROCESS, max),
    "process_start_time_seconds": min,
    "process_max_fds": min,
    "python_info": max,
}
"""How to merge two values of a sample, if not by adding them."""


class Sample(msgspec.Struct, frozen=True, array_like=True):
    name: str
    labels: dict[str, str]
    value: float


class Family(msgspec.Struct, frozen=True, array_like=True):
    """A metric with its samples. kind: as in the text format; its name is without the _total of counters."""

    name: str
    kind: str
    help: str
    samples: tuple[Sample, ...]


Families = tuple[Family, ...]


def families(registry: CollectorRegistry) -> Families:
    """The current values of a registry."""
    return tuple(
        Family(
            metric.name,
            metric.type,
            metric.documentation,
            tuple(Sample(sample.name, dict(sample.labels), sample.value) for sample in metric.samples),
        )
        for metric in registry.collect()
    )


def merged(registries: Iterable[Families]) -> Families:
    """Merges registries; families and samples stay in the order of their first occurrence."""
    heads: dict[str, Family] = {}
    values: dict[str, dict[tuple[str, frozenset[tuple[str, str]]], Sample]] = {}
    for family in (family for registry in registries for family in registry):
        heads.setdefault(family.name, family)
        found = values.setdefault(family.name, {})
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            before = found.get(key)
            found[key] = sample if before is None else _together(before, sample)
    return tuple(Family(name, head.kind, head.help, tuple(values[name].values())) for name, head in heads.items())


def _together(one: Sample, other: Sample) -> Sample:
    method = min if one.name.endswith(CREATED) else METHODS.get(one.name)
    value = one.value + other.value if method is None else method(one.value, other.value)
    return Sample(one.name, one.labels, value)


def lasting(registry: Families) -> Families:
    """The values to keep of a process that has ended: its counters and histograms, so that sums never decrease."""
    return tuple(family for family in registry if family.kind in ("counter", "histogram"))


def text(registry: Families) -> bytes:
    """Prometheus text format."""
    return generate_latest(_Page(registry))


class _Page(Collector):
    def __init__(self, registry: Families) -> None:
        self._families = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.help, family.kind)
            for sample in family.samples:
                metric.add_sample(sample.name, sample.labels, sample.value)
            yield metric


PERIOD = 10.0
"""Seconds between two readings."""
KEPT = 31
"""Readings that are kept: five minutes, some 10 kB each."""
COUNTED = ("requests_total", "admission_rejections_total", "steps_total", "generated_tokens_total")
GAUGES = ("requests_running", "requests_waiting", "kv_cache_pages", "gpu_memory_bytes", "graph_bytes")
DURATIONS = ("time_to_first_token_seconds", "inter_token_duration_seconds", "time_to_first_audio_seconds")
WATCHED = (*COUNTED, *GAUGES, *(f"{name}_bucket" for name in DURATIONS), "audio_generated_seconds_total")


class PastReading(msgspec.Struct, frozen=True):
    """age: seconds. metrics: in Prometheus's text format."""

    age: float
    metrics: str


class History:
    """The readings of the last five minutes."""

    def __init__(self) -> None:
        self._readings: deque[tuple[float, bytes]] = deque(maxlen=KEPT)

    async def keep(self, metrics: Metrics) -> None:
        """Read every PERIOD seconds, until it is cancelled."""
        while True:
            self._readings.append((time.monotonic(), metrics.exposition(WATCHED)))
            await asyncio.sleep(PERIOD)

    @property
    def readings(self) -> list[PastReading]:
        """Oldest first."""
        now = time.monotonic()
        return [PastReading(now - at, text.decode()) for at, text in self._readings]
