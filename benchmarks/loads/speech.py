"""What loads of speech have in common: solver steps, voices, and the row of a result."""

from __future__ import annotations

from benchmarks.measure.record import Row
from service.api.speech.speaker import DEFAULT_VOICE, OPENAI_VOICES
from service.cli.bench.run import summary
from service.cli.bench.traffic import Record, SpeechLoad

SOLVER_STEPS = 10
VOICES = (DEFAULT_VOICE, *OPENAI_VOICES)
"""Streams of one voice share the keys of its reference, so listeners have different ones."""
_MOST_NAMED = 20
"""Of streams with an underrun."""


def row_of(load: SpeechLoad, records: list[Record]) -> Row:
    """A row of what the clients of `load` saw. underruns: when their streams began, after the first request."""
    result = summary(load, records)
    row = {"format": load.response_format, "utterance_s": load.seconds}
    row |= {name: result[name] for name in ("requests", "succeeded", "refused", "failed")}
    row |= {name: result[name] for name in ("failures",) if name in result}
    if not result["succeeded"]:
        return row
    row |= {
        f"first_{name}_ms": 1e3 * result["first"][name] for name in ("p10", "p25", "p50", "p75", "p90", "p95", "p99")
    }
    row |= {f"rtf_{name}": result["realtime_factor"][name] for name in ("p10", "p50", "p90", "p95")}
    row |= {"audio_s_per_s": result["audio_seconds_per_second"], "requests_per_s": result["requests_per_second"]}
    if load.response_format == "pcm":
        row |= {"streams_with_underrun": result["streams_with_underrun"], "underrun_s": result["underrun_seconds"]}
        if late := [record for record in records if record.underrun and not record.error]:
            begin = min(record.start for record in records)
            row["underruns"] = [{"begun_s": one.start - begin, "silent_s": one.underrun} for one in late[:_MOST_NAMED]]
    if load.rate:
        row["send_delay_p99_ms"] = 1e3 * result["delay"]["p99"]
    return row
