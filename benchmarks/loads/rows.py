"""Rows of results: what the clients of a load saw; and what loads of speech have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.measure.record import Row
from service.api.speech.speaker import DEFAULT_VOICE, OPENAI_VOICES
from service.cli.bench.run import summary
from service.cli.bench.traffic import AnyLoad, Record, SpeechLoad

SOLVER_STEPS = 10
VOICES = (DEFAULT_VOICE, *OPENAI_VOICES)
"""Streams of one voice share the keys of its reference, so listeners have different ones."""
_MOST_NAMED = 20
"""Of streams with an underrun."""


def row_of(load: AnyLoad, records: list[Record]) -> Row:
    """Requests, rates, and quantiles in milliseconds; of requests that all failed, their number alone."""
    result = summary(load, records)
    counts = ("requests", "succeeded", "refused", "failed", "failures")
    row: Row = {name: result[name] for name in counts if name in result}
    if not result["succeeded"]:
        return row
    row |= _milliseconds("first", result["first"])
    row |= {"requests_per_s": result["requests_per_second"], "seconds": result["wall_seconds"]}
    if load.rate:
        row["send_delay_p99_ms"] = 1e3 * result["delay"]["p99"]
    if isinstance(load, SpeechLoad):
        return row | _speech(load, result, records)
    row |= _milliseconds("gap", result["gap"])
    for turn, first in result.get("first_by_turn", {}).items():
        row |= _milliseconds(f"turn_{turn}", first)
    row |= _milliseconds("later", result.get("first_later", {}))
    row |= {name: result.get(f"{name}_mean", 0.0) for name in ("prompt_tokens", "completion_tokens")}
    return row | {"tokens_per_s": result.get("tokens_per_second", 0.0), "cached_tokens": result["cached_tokens"]}


def _milliseconds(name: str, seconds: Mapping[str, float]) -> Row:
    return {f"{name}_{quantile}_ms": 1e3 * value for quantile, value in seconds.items()}


def _speech(load: SpeechLoad, result: Mapping[str, Any], records: list[Record]) -> Row:
    """underruns: when their streams began, after the first request."""
    row: Row = {"format": load.response_format, "utterance_s": load.seconds}
    row |= {f"rtf_{name}": value for name, value in result["realtime_factor"].items()}
    row["audio_s_per_s"] = result["audio_seconds_per_second"]
    if load.response_format == "pcm":
        row |= {"streams_with_underrun": result["streams_with_underrun"], "underrun_s": result["underrun_seconds"]}
        if late := [record for record in records if record.underrun and not record.error]:
            begin = min(record.start for record in records)
            row["underruns"] = [{"begun_s": one.start - begin, "silent_s": one.underrun} for one in late[:_MOST_NAMED]]
    return row
