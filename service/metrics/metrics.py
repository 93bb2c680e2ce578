"""Every metric in one place. All of them live in the API process; the engine sends Observation events by metric name.

Names follow Prometheus's naming guide: base units in the plural, _total at the end of counters, no colons. Labels have
low cardinality: `model` is the first served name of a hosted model (or "unknown"), never a string that a client sent.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from service.graphs.observations import Observation
from service.link.messages import EngineState, ModelState, ProcessUsage

MILLISECONDS = (
    0.0002, 0.0003, 0.0004, 0.0005, 0.0006, 0.0008, 0.001, 0.00125, 0.0015, 0.00175, 0.002, 0.0025, 0.003, 0.004, 0.005,
    0.006, 0.008, 0.01, 0.0125, 0.015, 0.0175, 0.02,
)  # fmt: skip
"""0.2 to 20 ms, the range of steps on a GPU. Each bound is at most half above the one before it, and between 0.8 and 3
ms, the range of decode steps, at most a third: a step that becomes slower by that much falls into another bucket."""
STEP = (*MILLISECONDS, 0.03, 0.05, 0.075, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
INTER_TOKEN = (*MILLISECONDS, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)
FIRST_TOKEN = (
    0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.0175, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1,
    0.15, 0.2, 0.25, 0.35, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80,
)  # fmt: skip
REQUEST = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92, 163.84, 327.68, 655.36,
)  # fmt: skip
FIRST_AUDIO = (
    0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.0175, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1,
    0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 30,
)  # fmt: skip
REALTIME_FACTOR = (0.02, 0.05, 0.08, 0.1, 0.13, 0.16, 0.2, 0.3, 0.4, 0.5, 0.6, 0.75, 0.9, 1, 1.25, 1.5, 2, 5, 10)
WORK = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)
"""Seconds of the work around the steps."""
LOAD = (0.1, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
RATIO = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 1)
PREDICTION = (0.25, 0.5, 0.75, 0.9, 1, 1.1, 1.25, 1.5, 2, 4)
SLACK = (-5, -1, -0.5, -0.1, 0, 0.1, 0.25, 0.5, 1, 2, 5, 10, 30, 60)
COUNT = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
TOKENS = (1, 4, 16, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


PREFIX = "reprise"
ENDPOINTS = (
    *("chat", "responses", "completions", "embeddings", "rerank", "transcriptions"),
    *("speech", "voices", "realtime"),
)
CONTENT_TYPE = CONTENT_TYPE_LATEST


@dataclass(frozen=True)
class MetricSpec:
    """One metric. `name` has no prefix; counters' names end in _total."""

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    values: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """All values of labels whose values are known beforehand. Counters with only such labels start at 0."""
    of_any_process: bool = False
    """Whether the page of several API processes shows the largest value of this gauge, not the sum."""


def _counter(name: str, help: str, *labels: str, **values: tuple[str, ...]) -> MetricSpec:
    """values: the labels behind `labels`, with all their values."""
    return MetricSpec("counter", name, help, (*labels, *values), values=values)


def _gauge(name: str, help: str, *labels: str, of_any_process: bool = False) -> MetricSpec:
    return MetricSpec("gauge", name, help, labels, of_any_process=of_any_process)


def _histogram(name: str, help: str, buckets: tuple[float, ...], *labels: str) -> MetricSpec:
    return MetricSpec("histogram", name, help, labels, buckets)


GROUPS: dict[str, tuple[MetricSpec, ...]] = {
    "Requests": (
        _counter("requests_total", "Answered requests.", "model", "endpoint", "status", "outcome"),
        _histogram("request_duration_seconds", "Arrival to last byte.", REQUEST, "model", "endpoint", "outcome"),
        _gauge("http_requests_in_progress", "Requests being answered, by endpoint.", "endpoint"),
        _counter(
            "admission_rejections_total",
            "Requests refused for load, by reason (in_flight, media, bytes, fetches, queue_full, queue_timeout).",
            endpoint=ENDPOINTS,
            reason=("in_flight", "media", "bytes", "fetches", "queue_full", "queue_timeout"),
        ),
        _gauge("admitted_bytes", "Bytes of request bodies, fetched and decoded media in progress."),
        _counter("client_disconnects_total", "Requests whose client disconnected early.", endpoint=ENDPOINTS),
        _histogram("request_input_tokens", "Prompt positions of a request, media included.", TOKENS, "model"),
        _histogram("request_output_tokens", "Generated tokens of a request.", TOKENS, "model"),
        _histogram("request_images", "Images of a request.", COUNT, "model"),
        _histogram("request_video_frames", "Decoded video frames of a request.", COUNT, "model"),
        _histogram(
            "time_to_first_token_seconds",
            "Time to first token (TTFT): arrival to the first token at the API.",
            FIRST_TOKEN,
            "model",
        ),
        _histogram(
            "inter_token_duration_seconds",
            "Inter-token latency (ITL): gap between deliveries, per token.",
            INTER_TOKEN,
            "model",
        ),
        _counter("prompt_tokens_total", "Prompt positions by kind (text, image, video, audio).", "model", "kind"),
        _counter("generated_tokens_total", "Tokens delivered to clients.", "model"),
        _counter(
            "engine_choices_total",
            "Requests sent to one of several engines (affinity: by their pictures or prefix; spilled: to another, "
            "as that one was full; load: to the least loaded; moved: again, after one refused them or ended).",
            reason=("affinity", "spilled", "load", "moved"),
        ),
        _counter("tool_calls_total", "Tool calls in answers.", "model"),
        _counter(
            "realtime_responses_total",
            "Responses of /v1/realtime, by status (completed, cancelled, failed, incomplete, refused).",
            "model",
            status=("completed", "cancelled", "failed", "incomplete", "refused"),
        ),
    ),
    "Media": (
        _histogram("media_fetch_duration_seconds", "Reading a media URL (kind: data, remote).", WORK, "kind"),
        _histogram("media_decode_duration_seconds", "Decoding a picture, video or audio.", WORK, "kind"),
        _histogram("preprocess_duration_seconds", "Resizing and laying out one item for its encoder.", WORK, "kind"),
        _histogram("tokenize_duration_seconds", "Chat template, tokens and positions of a prompt.", WORK, "model"),
        _counter("audio_heard_seconds_total", "Seconds of recordings that were transcribed.", "model"),
        _counter("media_rejections_total", "Media refused, by kind and reason.", "kind", "reason"),
    ),
    "Speech requests": (
        _histogram("time_to_first_audio_seconds", "Arrival to the first audio sent.", FIRST_AUDIO, "model"),
        _histogram(
            "spoken_first_audio_seconds",
            "Spoken answers: arrival of the chat request to the first generated audio, by chat model.",
            FIRST_AUDIO,
            "model",
        ),
        _histogram("audio_realtime_factor", "Generation time / duration of the audio.", REALTIME_FACTOR, "model"),
        _histogram("audio_chunk_gap_seconds", "Gap between audio chunks of a stream.", WORK, "model"),
        _histogram("audio_underrun_seconds", "Worst playback deficit of a stream.", WORK, "model"),
        _counter(
            "audio_streams_total", "Finished live streams (underrun: true, false).", "model", underrun=("true", "false")
        ),
        _counter("speech_characters_total", "Characters spoken.", "model"),
        _counter("speech_truncated_total", "Segments that ended at their cap, not by themselves.", "model"),
        _histogram("audio_encode_duration_seconds", "Encoding one chunk (codec).", STEP, "format"),
        _counter("built_in_voices_made_total", "Built-in voices made, each at its first use.", "model"),
        _counter(
            "speech_verifications_total",
            "Attempts at a text that a recogniser heard, by outcome (passed, failed, unavailable).",
            "model",
            outcome=("passed", "failed", "unavailable"),
        ),
    ),
    "Server": (
        _gauge("ready", "1 when the server accepts requests.", of_any_process=True),
        _counter("api_process_restarts_total", "API processes that replaced one that had ended."),
        _gauge("event_loop_lag_seconds", "Delay of a timer in the API process.", of_any_process=True),
        _gauge("event_loop_tasks", "Tasks of the API process."),
        _gauge("build_info", "Always 1; versions in the labels.", "version", "python", "torch", of_any_process=True),
    ),
    "Phases of a chat request": (
        _histogram("queue_duration_seconds", "Arrival at the engine to first scheduling.", STEP, "model"),
        _histogram("vision_encode_duration_seconds", "One packed encoder pass.", STEP, "model", "route"),
        _histogram("prefill_duration_seconds", "First scheduling to the end of the prefill.", STEP, "model"),
    ),
    "Steps and graphs": (
        _counter(
            "steps_total",
            "Steps by kind (encoder, prefill, cached_prefill, decode, verify, tail, vae; sample: after a prefill; "
            "guided_layers, guided_sample: the halves of a decode step with a guided row), "
            'route (replay, eager) and reason (why eager; "captured" on replay).',
            "model",
            "kind",
            "route",
            "reason",
        ),
        _histogram("step_duration_seconds", "Launch to results on the host.", STEP, "model", "kind", "route"),
        _histogram("step_host_duration_seconds", "Python time of a step.", STEP, "model", "kind"),
        _counter("drafted_tokens_total", "Drafts of tokens that steps of kind verify had.", "model"),
        _counter("accepted_tokens_total", "Drafts that were accepted.", "model"),
        _histogram("grammar_build_duration_seconds", "Building the matcher of a grammar.", WORK, "model"),
        _histogram("guided_mask_duration_seconds", "Computing the masks of a step's guided rows.", STEP, "model"),
        _histogram("bucket_occupancy_ratio", "Real rows / rows of the replayed bucket.", RATIO, "model", "kind"),
        _counter("replayed_rows_total", "Real rows in replayed buckets.", "model", "kind"),
        _counter("padded_rows_total", "Padding rows in replayed buckets.", "model", "kind"),
        _counter(
            "graph_captures_total", "Captures by outcome (captured, failed, refused).", "model", "kind", "outcome"
        ),
        _histogram("graph_capture_duration_seconds", "One capture.", WORK, "model", "kind"),
        _counter(
            "memory_retries_total", "Second tries for lack of memory (succeeded, failed).", "model", "kind", "outcome"
        ),
        _counter(
            "kernel_compilations_total",
            "GPU kernels compiled or loaded from Triton's cache, by phase (start, serving). While serving, each one "
            "delays every request: there should be none.",
            "phase",
            "cached",
        ),
        _counter(
            "kernel_fallbacks_total",
            "Launches, outside of replays, that ran as plain PyTorch because the GPU does not support the kernel's "
            "configuration: slower, and named once in the log.",
            "kernel",
        ),
        _gauge("graph_captures_left", "Captures that are still made while the engine is idle, after readiness."),
        _gauge("graph_bytes", "Device memory held by captured CUDA graphs and their static buffers."),
        _gauge("gpu_memory_bytes", "Device memory by state (tensors, cached, other, free), which add up.", "state"),
        _histogram("model_load_duration_seconds", "Reading a checkpoint.", LOAD, "model"),
    ),
    "Caches": (
        _counter("encoder_cache_hits_total", "Items whose embeddings were cached.", "model"),
        _counter("encoder_cache_misses_total", "Items that had to be encoded.", "model"),
        _gauge("encoder_cache_bytes", "Bytes of cached embeddings.", "model"),
        _counter("corrupted_requests_total", "Requests failed for NaN or infinite results of their model.", "model"),
        _counter("prefix_cache_hit_tokens_total", "Prompt positions found in the prefix cache.", "model"),
        _counter("prefix_cache_query_tokens_total", "Prompt positions looked up in the prefix cache.", "model"),
        _counter("state_snapshot_hits_total", "Prompts that went on from a cached recurrent state.", "model"),
        _gauge("state_snapshots", "Cached recurrent states; of models without such state, 0.", "model"),
        _gauge("state_snapshot_bytes", "Bytes of cached recurrent states.", "model"),
        _counter("preemptions_total", "Sequences preempted for lack of pages, to be computed again.", "model"),
    ),
    # Routers scrape requests_running, requests_waiting and kv_cache_usage_ratio.
    "Load": (
        _gauge("requests_running", "Running sequences, which have request slots.", "model"),
        _gauge("requests_waiting", "Requests waiting for a request slot.", "model"),
        _gauge("kv_cache_usage_ratio", "Share of the KV blocks (pages) in use; cached ones do not count.", "model"),
        _gauge("kv_cache_pages", "KV blocks (pages) by state (used, cached, total).", "model", "state"),
        _gauge("slots_used", "Request slots in use.", "model"),
    ),
    "Speech in the engine": (
        _histogram("audio_slack_seconds", "Smallest slack of any live stream, per tick.", SLACK, "model"),
        _histogram(
            "speech_part_duration_seconds",
            "Device time of a step's part (prefill, tail, decode, vae; clip: encoding reference audio).",
            STEP,
            "model",
            "part",
        ),
        _counter("audio_generated_seconds_total", "Seconds of generated audio.", "model"),
        _counter("speech_retries_total", "Unsent segments that ran to their cap and were generated again.", "model"),
        _counter("speech_preemptions_total", "Idle streams preempted: others that waited got their room.", "model"),
        _histogram("step_prediction_ratio", "Actual / predicted step time.", PREDICTION, "model", "kind"),
        _counter(
            "speech_rejections_total",
            "Speech refused at admission, by reason (queue_full, first_audio, load, too_long).",
            "model",
            reason=("queue_full", "first_audio", "load", "too_long"),
        ),
    ),
    "Engine": (
        _gauge("engine_up", "1 while the engine process lives and its heartbeat is fresh.", of_any_process=True),
        _counter("engine_restarts_total", "Restarts of the engine after a crash or hang."),
        _gauge(
            "start_phase_seconds",
            "The engine's last start by phase (process: Python and imports; load: checkpoints and compiled kernels; "
            "memory; capture; warm_up: at a first start on a GPU).",
            "phase",
        ),
        _counter("engine_cpu_seconds_total", "Processor time of the engine process, all threads."),
        _gauge("engine_resident_memory_bytes", "Memory of the engine process, without the GPU's."),
        _gauge("engine_threads", "Threads of the engine process."),
        _gauge("engine_info", "Always 1; the name of the engine's device.", "device", of_any_process=True),
    ),
}

OF_KIND = {"Phases of a chat request": "chat", "Speech requests": "speech", "Speech in the engine": "speech"}
"""Groups that apply only to models of one kind."""
OF_ENGINES = frozenset(
    spec.name
    for group in ("Phases of a chat request", "Steps and graphs", "Caches", "Load", "Speech in the engine", "Engine")
    for spec in GROUPS[group]
)
"""Metrics that are measured in an engine: with several engines they have the label `engine`."""
SPECS = tuple(spec for group in GROUPS.values() for spec in group)


class Metrics:
    """The registry of one server.

    models: kind (chat, speech) of each hosted model, by name. Counters whose label values are all known start at 0, so
    that rate() sees their first event.
    """

    def __init__(self, models: Mapping[str, str] | None = None) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        self._specs = {spec.name: spec for spec in SPECS}
        self._metrics: dict[str, Counter | Gauge | Histogram] = {}
        for spec in SPECS:
            histogram = partial(Histogram, buckets=spec.buckets)
            kind: Any = {"counter": Counter, "gauge": Gauge, "histogram": histogram}[spec.kind]
            self._metrics[spec.name] = kind(f"{PREFIX}_{spec.name}", spec.help, spec.labels, registry=self.registry)
        self._setters: dict[tuple[object, ...], Callable[..., None]] = {}
        self._engine_cpu = 0.0
        """Processor seconds of the current engine process that have been counted."""
        for group, specs in GROUPS.items():
            names = tuple(name for name, kind in (models or {}).items() if OF_KIND.get(group, kind) == kind)
            for spec in specs:
                self._start_at_zero(spec, {"model": names, **spec.values})

    def _start_at_zero(self, spec: MetricSpec, values: Mapping[str, tuple[str, ...]]) -> None:
        if spec.kind == "counter" and values.keys() >= set(spec.labels):
            for combination in itertools.product(*(values[label] for label in spec.labels)):
                self.observe(spec.name, 0, **dict(zip(spec.labels, combination, strict=True)))

    def observe(self, name: str, value: float = 1.0, /, **labels: str) -> None:
        """Adds to a counter, sets a gauge or observes in a histogram. KeyError for a name or labels not in SPECS."""
        self._setter(name, labels)(value)

    def observe_often(self, name: str, value: float, times: int, /, **labels: str) -> None:
        """Observes the same value in a histogram several times, at the cost of one observation."""
        self._setter(name, labels)(value, times)

    def _setter(self, name: str, labels: Mapping[str, str]) -> Callable[..., None]:
        key = (name, *labels.items())
        setter = self._setters.get(key)
        if setter is None:
            spec = self._specs[name]
            if labels.keys() != set(spec.labels):
                raise KeyError(f"{name} has the labels {spec.labels}, not {tuple(labels)}")
            metric = self._metrics[name]
            child = metric.labels(**labels) if labels else metric
            if isinstance(child, Histogram):
                setter = partial(_observe, child)
            else:
                setter = child.inc if isinstance(child, Counter) else child.set
            self._setters[key] = setter
        return setter

    def observe_events(self, events: Sequence[Observation]) -> None:
        """Observe events of the engine."""
        for event in events:
            self.observe(event.name, event.value, **event.labels)

    def observe_state(self, state: EngineState) -> None:
        """Sets gauges from the engine's heartbeat."""
        if state.device:
            self.observe("engine_info", 1, device=state.device)
        if state.process is not None:
            self._observe_process(state.process)
        self.observe("graph_bytes", state.graph_bytes)
        self.observe("graph_captures_left", state.captures_left)
        for kind, size in state.device_memory.items():
            self.observe("gpu_memory_bytes", size, state=kind)
        for model in state.models:
            name = model.model
            self.observe("requests_running", model.running, model=name)
            self.observe("requests_waiting", model.waiting, model=name)
            self.observe("slots_used", model.running, model=name)
            self.observe("kv_cache_usage_ratio", model.pages_used / max(1, model.pages_total), model=name)
            pages = {"used": model.pages_used, "cached": model.pages_cached, "total": model.pages_total}
            for kind, count in pages.items():
                self.observe("kv_cache_pages", count, model=name, state=kind)
            self.observe("encoder_cache_bytes", model.encoder_cache_bytes, model=name)
            self.observe("state_snapshots", model.snapshots, model=name)
            self.observe("state_snapshot_bytes", model.snapshot_bytes, model=name)

    def _observe_process(self, process: ProcessUsage) -> None:
        self.observe("engine_cpu_seconds_total", max(0.0, process.cpu_seconds - self._engine_cpu))
        self._engine_cpu = process.cpu_seconds
        self.observe("engine_resident_memory_bytes", process.resident_bytes)
        self.observe("engine_threads", process.threads)

    def observe_end(self, last: EngineState) -> None:
        """Sets the gauges of an engine that has ended to 0. The next engine counts its processor time from 0."""
        models = tuple(ModelState(model.model, 0, 0, 0, 0, 0) for model in last.models)
        memory = dict.fromkeys(last.device_memory, 0)
        self.observe_state(EngineState("down", "", models, 0, memory, process=last.process and ProcessUsage(0.0, 0, 0)))

    def exposition(self, names: Collection[str] = ()) -> bytes:
        """Prometheus text format. names: of samples, without the prefix; none: all."""
        wanted = [f"{PREFIX}_{name}" for name in names]
        return generate_latest(self.registry.restricted_registry(wanted) if wanted else self.registry)


def _observe(histogram: Histogram, value: float, times: int = 1) -> None:
    """Histogram.observe several times at once, without exemplars; the library has no method for that."""
    histogram._sum.inc(value * times)
    histogram._buckets[bisect_left(histogram._upper_bounds, value)].inc(times)
