"""OpenTelemetry spans of requests (docs/tracing.md). Off, unless the standard variables name an OTLP endpoint.

A request has one span, whose parent is the client's (W3C Trace Context). Its children are phases: of the API process,
and of the engine, which sends its times with the first delta (PhaseTimes). With a slow or missing collector spans are
lost, but no request is delayed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING

from service.link.messages import ChatDelta, PhaseTimes, ReferenceEncoded, SpeechDelta
from service.settings.reading import SettingsError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

log = logging.getLogger(__name__)

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
PROTOCOL = "http/protobuf"
CLOSE_SECONDS = 3.0
SERVER_ERROR = 500

Value = str | int | float | bool

_current: ContextVar[RequestTrace | None] = ContextVar("request_trace", default=None)


class Tracing:
    """Sends spans. provider: has the wanted processors and sampler."""

    def __init__(self, provider: TracerProvider) -> None:
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._provider = provider
        self._tracer = provider.get_tracer("reprise")
        self._propagator = TraceContextTextMapPropagator()

    def begin(self, method: str, path: str, headers: Mapping[str, str], arrival: float) -> RequestTrace | None:
        """The trace of a request that came at `arrival` (time.monotonic()); None when it is not sampled. A traceparent
        header that is malformed counts as none."""
        from opentelemetry.trace import SpanKind

        epoch = time.time_ns() - _nanoseconds(time.monotonic())
        span = self._tracer.start_span(
            f"{method} {path}",
            self._propagator.extract(headers),
            SpanKind.SERVER,
            {"http.request.method": method, "url.path": path},
            start_time=epoch + _nanoseconds(arrival),
        )
        return RequestTrace(self._tracer, span, epoch) if span.is_recording() else None

    def close(self) -> None:
        """Send the remaining spans, for at most CLOSE_SECONDS, since the collector may be gone."""
        thread = threading.Thread(target=self._provider.shutdown, name="tracing-close", daemon=True)
        thread.start()
        thread.join(CLOSE_SECONDS)


class RequestTrace:
    """The span of a request and its children. Times are those of time.monotonic()."""

    def __init__(self, tracer: Tracer, span: Span, epoch: int) -> None:
        """epoch: nanoseconds of the wall clock when time.monotonic() was 0. It is the same for all spans of a request,
        so that they stay consistent even if the wall clock is set."""
        from opentelemetry.trace import format_trace_id, set_span_in_context

        self._tracer = tracer
        self._span = span
        self._epoch = epoch
        self._context = set_span_in_context(span)
        self.trace_id = format_trace_id(span.get_span_context().trace_id)

    def phase(self, name: str, begin: float, end: float, *, error: str | None = None, **attributes: Value) -> None:
        """Add a child that has ended. error: why it ended early."""
        named = {f"reprise.{key}": value for key, value in attributes.items()}
        span = self._tracer.start_span(name, self._context, attributes=named, start_time=self._wall(begin))
        if error is not None:
            _fail(span, error)
        span.end(self._wall(end))

    def end(self, status: int, model: str, outcome: str, notes: Mapping[str, object]) -> None:
        """notes: further facts, as in the access log."""
        self._span.set_attributes(
            {
                "http.response.status_code": status,
                "gen_ai.request.model": model,
                "reprise.outcome": outcome,
                **{f"reprise.{key}": value for key, value in notes.items() if isinstance(value, Value)},
            }
        )
        if status >= SERVER_ERROR or outcome in ("error", "timeout"):
            _fail(self._span, outcome)
        self._span.end(self._wall(time.monotonic()))

    def _wall(self, at: float) -> int:
        return self._epoch + _nanoseconds(at)


class EngineTrace:
    """Phases of one request to the engine: queue, encoder, prefill, decode; of reference audio: reference."""

    def __init__(self, trace: RequestTrace, request_id: str) -> None:
        self._trace = trace
        self._request_id = request_id
        self._submitted = time.monotonic()
        self._times: PhaseTimes | None = None
        self._last: ChatDelta | SpeechDelta | ReferenceEncoded | None = None

    def note(self, delta: ChatDelta | SpeechDelta | ReferenceEncoded) -> None:
        self._last = delta
        self._times = self._times or getattr(delta, "times", None)

    def end(self, error: str | None = None) -> None:
        """Add the phases of a request that has ended. error: the code of its failure, or "aborted"."""
        now, times = time.monotonic(), self._times
        if isinstance(self._last, ReferenceEncoded):
            self._phase("reference", self._submitted, now)
        elif times is None or self._last is None:
            self._phase("queue", self._submitted, now, error=error or "ended")
        else:
            begin = times.scheduled if times.encoder is None else min(times.scheduled, times.encoder[0])
            self._phase("queue", self._submitted, begin)
            if times.encoder is not None:
                self._phase("encoder", *times.encoder)
            self._phase("prefill", times.scheduled, times.computed)
            steps = self._last.steps
            counts = {} if steps is None else {"steps": steps.steps, "steps_replayed": steps.replayed}
            self._phase("decode", times.computed, now, error=error, **counts)

    def _phase(self, name: str, begin: float, end: float, *, error: str | None = None, **attributes: int) -> None:
        self._trace.phase(name, begin, end, error=error, request=self._request_id, **attributes)


def enter(trace: RequestTrace | None) -> None:
    """Make it the current trace of this task, which serves one request, and of the tasks that it starts."""
    _current.set(trace)


def engine_trace(request_id: str) -> EngineTrace | None:
    """Phases of a request that is submitted now, within the current trace; None without one."""
    trace = _current.get()
    return None if trace is None else EngineTrace(trace, request_id)


@contextlib.contextmanager
def phase(name: str, **attributes: Value) -> Iterator[None]:
    """A span of the current trace around the body of the context; an exception that leaves it becomes its error."""
    trace, began = _current.get(), time.monotonic()
    error = None
    try:
        yield
    except BaseException as raised:
        error = type(raised).__name__
        raise
    finally:
        if trace is not None:
            trace.phase(name, began, time.monotonic(), error=error, **attributes)


def tracing_from(version: str, environ: Mapping[str, str] = os.environ) -> Tracing | None:
    """Tracing as the standard OTEL_ variables configure it; None without an endpoint, or if the extra is not installed.
    SettingsError for values that cannot be used."""
    named = next((name for name in ENDPOINTS if environ.get(name)), None)
    disabled = environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if named is None or disabled or "otlp" not in environ.get("OTEL_TRACES_EXPORTER", "otlp").split(","):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError:
        log.warning("%s is set, but no traces are sent: pip install 'reprise-server[tracing]'", named)
        return None
    protocol = next((environ[name] for name in PROTOCOLS if environ.get(name)), PROTOCOL)
    if protocol != PROTOCOL:
        log.warning("traces are sent as %s: %s is not supported", PROTOCOL, protocol)
    resource = Resource({"service.name": "reprise", "service.version": version})
    try:
        provider = TracerProvider(resource=resource.merge(OTELResourceDetector().detect()), shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    except ValueError as error:
        raise SettingsError(f"OTEL_ variables: {error}") from error
    log.info("traces are sent to the endpoint of %s", named)
    return Tracing(provider)


def _fail(span: Span, reason: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("error.type", reason)
    span.set_status(Status(StatusCode.ERROR, reason))


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)
