"""The requests that an engine is answering: what it sends for them goes to their streams."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from service.api.engines.request_metrics import count_rejection, observe_tokens
from service.api.engines.request_stream import EngineError, RequestStream
from service.link.messages import ChatDelta, Failed, Outputs, ReferenceEncoded, SpeechDelta
from service.metrics.metrics import Metrics


class InFlightRequests:
    """The streams of one engine's requests, by id. note_work: called when a request comes or ends."""

    def __init__(self, metrics: Metrics, note_work: Callable[[], None]) -> None:
        self.on_load: Callable[[int], None] = lambda in_flight: None
        """Called with the number of requests in flight when it has changed."""
        self.on_loss: Callable[[RequestStream, EngineError], bool] = lambda stream, error: False
        """Called for a request that fails before any of its answer has come; True: another engine has taken it over."""
        self._metrics = metrics
        self._note_work = note_work
        self._streams: dict[str, RequestStream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def __iter__(self) -> Iterator[str]:
        """Their ids."""
        return iter(self._streams)

    def find(self, request_id: str) -> RequestStream | None:
        return self._streams.get(request_id)

    def add(self, stream: RequestStream) -> None:
        self._note_work()
        self._streams[stream.request.request_id] = stream
        self.on_load(len(self._streams))

    def remove(self, request_id: str) -> RequestStream | None:
        """The stream of the request, which is not in flight any more; None if it was not."""
        stream = self._streams.pop(request_id, None)
        self._note_work()
        self.on_load(len(self._streams))
        return stream

    def take(self, outputs: Outputs) -> None:
        """Delivers deltas and failures to the streams that they are for."""
        now = time.monotonic()
        if outputs.chat:
            observe_tokens(self._metrics, self._streams, outputs.chat, now)
        for delta in outputs.chat:
            self._deliver(delta, now, last=delta.finish_reason is not None)
        for audio in outputs.speech:
            self._deliver(audio, now, last=audio.finished)
        for encoded in outputs.encoded:
            self._deliver(encoded, now, last=True)
        for failed in outputs.failed:
            self._on_failed(failed)

    def _deliver(self, delta: ChatDelta | SpeechDelta | ReferenceEncoded, now: float, *, last: bool) -> None:
        stream = self._streams.get(delta.request_id)
        if stream is None:  # aborted while its last deltas were on their way
            return
        stream.last_delivery = now
        stream.deliver(delta, last=last)
        if last:
            self.remove(delta.request_id)

    def _on_failed(self, failed: Failed) -> None:
        stream = self.remove(failed.request_id)
        if stream is None:
            return
        error = EngineError(failed.status, failed.code, failed.message, failed.field, failed.retry_after)
        if stream.last_delivery is not None or not self.on_loss(stream, error):
            count_rejection(self._metrics, stream.request, failed.code)
            stream.fail(error)

    def fail_all(self, error: EngineError) -> None:
        """Fails all requests, except for those that another engine takes over."""
        streams, self._streams = self._streams, {}
        self.on_load(0)
        for stream in streams.values():
            if stream.last_delivery is not None or not self.on_loss(stream, error):
                stream.fail(error)
