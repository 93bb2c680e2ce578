"""Observes the engine's answers in metrics: first tokens, gaps between tokens, refusals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from service.api.engines.request_stream import Request, RequestStream
from service.link.messages import ChatDelta, ChatRequest
from service.metrics.metrics import Metrics


def observe_tokens(
    metrics: Metrics, streams: Mapping[str, RequestStream], deltas: Sequence[ChatDelta], now: float
) -> None:
    """TTFT and ITL of streams by request id, before their last delivery is set to `now`. Rows of a step mostly share
    model and gap, so equal observations are made together."""
    tokens: Counter[str] = Counter()
    gaps: Counter[tuple[str, float]] = Counter()
    for delta in deltas:
        stream = streams.get(delta.request_id)
        count = len(delta.token_ids)
        if stream is None or not count:
            continue
        model = stream.request.model
        tokens[model] += count
        if stream.last_delivery is None:
            metrics.observe("time_to_first_token_seconds", now - stream.request.arrival, model=model)
        else:
            gaps[model, (now - stream.last_delivery) / count] += count
    for model, count in tokens.items():
        metrics.observe("generated_tokens_total", count, model=model)
    for (model, gap), count in gaps.items():
        metrics.observe_often("inter_token_duration_seconds", gap, count, model=model)


def count_rejection(metrics: Metrics, request: Request, code: str) -> None:
    """Counts queue timeouts, and full queues of chat; those of speech are counted in the engine."""
    endpoint = "chat" if isinstance(request, ChatRequest) else "speech"
    if code == "queue_timeout" or (code == "overloaded" and endpoint == "chat"):
        reason = "queue_full" if code == "overloaded" else code
        metrics.observe("admission_rejections_total", endpoint=endpoint, reason=reason)
