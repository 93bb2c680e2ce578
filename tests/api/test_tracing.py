"""Spans of requests: what they are about, how they hang together, whose trace they belong to."""

from __future__ import annotations

import http.server
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased
from opentelemetry.trace import StatusCode
from websockets.sync.client import connect

from service.api.tracing import Tracing, tracing_from
from tests.media.samples import data_url, encoded, picture
from tests.support.fake_engine import FakeEngine
from tests.support.fake_talker import talking_catalog
from tests.support.processes import served
from tests.support.servers import RunningServer, running_server
from tests.support.victims import SMALL
from tests.support.waiting import GENEROUS, wait

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


class Traced:
    """A server whose spans stay in memory. `spans` are those of the newest request, its own first, then by their
    begin."""

    def __init__(self, server: RunningServer, exporter: InMemorySpanExporter) -> None:
        self.server = server
        self._exporter = exporter

    def post(self, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
        self._exporter.clear()
        return httpx.post(self.server.url + path, json=body, headers=headers, timeout=GENEROUS)

    def chat(self, text: Any = "hello", /, *, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}
        return self.post("/v1/chat/completions", body, **(headers or {}))

    def spans(self) -> list[Any]:
        wait(lambda: any(_is_server(span) for span in self._exporter.get_finished_spans()), what="the request's span")
        found = self._exporter.get_finished_spans()
        return sorted(found, key=lambda span: (not _is_server(span), span.start_time or 0))


def _is_server(span: ReadableSpan) -> bool:
    return span.kind.name == "SERVER"


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    voices = str(tmp_path_factory.mktemp("voices"))
    catalog, flags = talking_catalog(), {"voices_dir": voices, "fixed_voices": "off"}
    talker = FakeEngine()
    with running_server(catalog, engine=talker.serve, tracing=Tracing(provider), **flags) as server:
        yield Traced(server, exporter)


def assert_whole(spans: list[Any], *names: str) -> None:
    """One trace of these spans; every child is of the request, and lies within it."""
    assert tuple(span.name for span in spans) == names
    request, *children = spans
    assert {span.context.trace_id for span in spans} == {request.context.trace_id}
    for child in children:
        assert child.parent.span_id == request.context.span_id
        # All come from one monotonic clock, so the machine's load and a wall clock that is set make no difference.
        assert request.start_time <= child.start_time <= child.end_time <= request.end_time


def test_a_chat_is_a_span_with_its_phases(traced: Traced) -> None:
    """In the trace of its client."""
    url = data_url(encoded(picture(16, 16), "PNG"))
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "hello"}]
    assert traced.chat(content, headers=SAMPLED, stream=True).status_code == 200
    spans = traced.spans()
    assert_whole(spans, "POST /v1/chat/completions", "media", "queue", "prefill", "decode")
    request, media, queue, prefill, decode = spans
    assert (f"{request.context.trace_id:032x}", f"{request.parent.span_id:016x}") == (TRACE, PARENT)
    assert media.attributes["reprise.kind"] == "image" and decode.attributes["reprise.steps"] == 10
    told = {"gen_ai.request.model": "tiny", "http.response.status_code": 200, "reprise.outcome": "ok"}
    assert told.items() <= dict(request.attributes).items()
    assert (queue.end_time, prefill.end_time) == (prefill.start_time, decode.start_time)


def test_speech_is_traced_to_its_first_audio(traced: Traced) -> None:
    assert traced.post("/v1/audio/speech", {"model": "talker", "input": "Good morning."}).status_code == 200
    assert_whole(traced.spans(), "POST /v1/audio/speech", "queue", "prefill", "decode")


def test_a_websocket_is_a_span_with_the_phases_of_each_utterance(traced: Traced) -> None:
    traced._exporter.clear()
    with connect(traced.server.url.replace("http", "ws", 1) + "/v1/audio/speech/stream") as socket:
        socket.send(json.dumps({"type": "session.config", "model": "talker"}))
        for text in ("One.", "Two."):
            socket.send(json.dumps({"type": "input.text", "text": text}))
            socket.send(json.dumps({"type": "input.done"}))
            while not (isinstance(message := socket.recv(GENEROUS), str) and "session.done" in message):
                pass
        socket.send(json.dumps({"type": "session.close"}))
    assert_whole(traced.spans(), "WEBSOCKET /v1/audio/speech/stream", *["queue", "prefill", "decode"] * 2)


@pytest.mark.parametrize(
    ("path", "body", "where"),
    [
        ("/v1/chat/completions", {"model": "tiny", "messages": [{"role": "user", "content": "!fail"}]}, "queue"),
        ("/v1/audio/speech", {"input": "One. !mute", "stream": False, "split_granularity": "sentence"}, "decode"),
    ],
)
def test_a_request_that_fails_says_where(traced: Traced, path: str, body: dict[str, Any], where: str) -> None:
    assert traced.post(path, body).status_code == 500
    request, *_, last = traced.spans()
    assert request.status.status_code == StatusCode.ERROR
    assert (last.name, last.attributes["error.type"]) == (where, "fake_failure")


def test_a_client_that_leaves_ends_the_decode(traced: Traced) -> None:
    traced._exporter.clear()
    body = {"model": "tiny", "messages": [{"role": "user", "content": "!endless"}], "stream": True}
    with httpx.stream("POST", f"{traced.server.url}/v1/chat/completions", json=body, timeout=GENEROUS) as response:
        next(response.iter_bytes())
    request, _, _, decode = traced.spans()
    assert request.attributes["reprise.outcome"] == decode.attributes["error.type"] == "aborted"


def test_probes_and_scrapes_are_not_traced(traced: Traced) -> None:
    traced._exporter.clear()
    for path in ("/health", "/ready", "/metrics", "/v1/models"):
        assert httpx.get(traced.server.url + path).status_code == 200
    assert traced.chat().status_code == 200
    assert [span.name for span in traced.spans() if _is_server(span)] == ["POST /v1/chat/completions"]


def test_what_is_not_sampled_is_not_followed() -> None:
    off = Tracing(TracerProvider(sampler=ParentBased(ALWAYS_OFF)))
    assert off.begin("POST", "/x", {}, 0.0) is None
    assert off.begin("POST", "/x", SAMPLED, 0.0) is not None, "the client has decided"


def test_no_endpoint_means_no_tracing_and_no_import(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    for variables in ({}, {ENDPOINT: ""}, {"OTEL_SERVICE_NAME": "x"}):
        assert tracing_from("1", variables) is None
    for name, value in (("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")):
        assert tracing_from("1", {ENDPOINT: "http://localhost:1", name: value}) is None


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """An OTLP endpoint, and the spans that it has been sent, each with its resource's attributes as `.resource`."""
    received: list[Any] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
            for group in body.resource_spans:
                resource = {item.key: item.value.string_value for item in group.resource.attributes}
                received.extend((span, resource) for scope in group.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", received
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.slow
def test_a_real_server_sends_its_spans_to_a_collector() -> None:
    url = data_url(encoded(picture(64, 64), "PNG"))
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": "What is this?"}]
    body = {"model": "qwen2_vl", "messages": [{"role": "user", "content": content}], "max_tokens": 4}
    with collector() as (endpoint, received):
        variables = {ENDPOINT: endpoint, "OTEL_SERVICE_NAME": "eyes", "OTEL_BSP_SCHEDULE_DELAY": "60000"}
        with served(*SMALL, **variables) as server:
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, headers=SAMPLED, timeout=GENEROUS)
            assert answer.status_code == 200, answer.text
            speech = {"model": "voxcpm2", "input": "Good morning.", "max_len": 4}
            assert httpx.post(f"{server.url}/v1/audio/speech", json=speech, timeout=GENEROUS).status_code == 200
        wait(lambda: len([span for span, _ in received if span.kind == 2]) == 2, what="both requests' spans")
    chat = sorted(
        (span for span, _ in received if span.trace_id.hex() == TRACE), key=lambda span: span.start_time_unix_nano
    )
    assert [span.name for span in chat] == [
        "POST /v1/chat/completions", "media", "queue", "encoder", "prefill", "decode"
    ]  # fmt: skip
    times = {span.name: (span.start_time_unix_nano, span.end_time_unix_nano) for span in chat}
    assert times["encoder"][1] <= times["prefill"][1] <= times["decode"][0] + 1_000_000
    assert {resource["service.name"] for _, resource in received} == {"eyes"}
    spoken = [span.name for span, _ in received if span.trace_id.hex() != TRACE]
    assert {"POST /v1/audio/speech", "queue", "prefill", "decode"} <= set(spoken)
    logged = [json.loads(line) for line in server.log if line.startswith("{")]
    assert TRACE in {entry.get("trace_id") for entry in logged}
