"""What the steps of a server took during a load, from two readings of its metrics; nothing of a server without them."""

from __future__ import annotations

import math
import urllib.error
from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.measure.record import Row
from benchmarks.servers.process import Server

PREFILL_KINDS = ("prefill", "cached_prefill")
"""Kinds of reprise_steps_total in which a prompt is computed."""
PARTS = {"encoder": ("encoder",), "prefill": PREFILL_KINDS, "decode": ("decode",)}

Samples = Mapping[str, float]


@dataclass(frozen=True)
class Steps:
    """Counters of a server at one moment.

    counts: steps by "kind route reason". seconds, timed: by kind, all steps' seconds and their number, each from its
    launch, or the end of the step before, to its results. buckets: steps by "kind route le", those of at most `le`
    seconds. rows: real rows of replayed steps, by kind.
    """

    counts: Samples = field(default_factory=dict)
    seconds: Samples = field(default_factory=dict)
    timed: Samples = field(default_factory=dict)
    buckets: Samples = field(default_factory=dict)
    rows: Samples = field(default_factory=dict)


def read(server: Server) -> Steps:
    try:
        return Steps(
            server.samples("reprise_steps_total", "kind", "route", "reason"),
            server.samples("reprise_step_duration_seconds_sum", "kind"),
            server.samples("reprise_step_duration_seconds_count", "kind"),
            server.samples("reprise_step_duration_seconds_bucket", "kind", "route", "le"),
            server.samples("reprise_replayed_rows_total", "kind"),
        )
    except urllib.error.HTTPError:
        return Steps()


def prefill_routes(before: Steps, after: Steps) -> Row:
    """The share of eager prefills, and their number by reason; None where no prefill was counted."""
    reasons: dict[str, float] = {}
    prefills = 0.0
    for key, more in _more(before.counts, after.counts).items():
        kind, route, reason = key.split(" ", 2)
        if kind not in PREFILL_KINDS or not more:
            continue
        prefills += more
        if route == "eager":
            reasons[f"{kind}: {reason}"] = more
    share = sum(reasons.values()) / prefills if prefills else None
    return {"prefills": prefills, "eager_prefill_share": share, "eager_prefills": reasons}


def busy_shares(before: Steps, after: Steps, seconds: float) -> Row:
    """Shares of encoder passes, prefills and decode steps in the `seconds` of a load, and of all together; None where
    none was measured. Under load there is always a step to launch, so that this is near 1 however long steps take."""
    spent = _more(before.seconds, after.seconds)
    shares = {name: sum(spent.get(kind, 0.0) for kind in kinds) / seconds for name, kinds in PARTS.items()}
    if not any(shares.values()):
        return {"gpu_busy_share": None}
    return {"gpu_busy_share": sum(shares.values()), **{f"{name}_share": share for name, share in shares.items()}}


def reached(before: Steps, after: Steps, streams: int, requests: int, tokens: float, rate: float) -> Row:
    """`rate` (tokens/s) of a closed loop as a share of what its steps allow one after the other: `streams` requests of
    `tokens` tokens each, in the time of their encoder passes and prefills and of tokens - 1 decode steps.

    encoder_ms, prefill_ms: of a request. decode_ms: the mean decode step, of decode_rows rows in the mean: fewer than
    `streams`, since a new request's encoder pass and prefill come first.
    """
    spent, timed = _more(before.seconds, after.seconds), _more(before.timed, after.timed)
    if not timed.get("decode") or not requests:
        return {"steps_allow_share": None}
    encoder, prefill = (sum(spent.get(kind, 0.0) for kind in PARTS[name]) / requests for name in ("encoder", "prefill"))
    decode = spent["decode"] / timed["decode"]
    allowed = streams * tokens / (streams * (encoder + prefill) + (tokens - 1) * decode)
    replays = sum(more for key, more in _more(before.counts, after.counts).items() if key.startswith("decode replay "))
    rows = _more(before.rows, after.rows).get("decode", 0.0)
    return {
        "steps_allow_share": rate / allowed,
        "steps_allow_tokens_per_s": allowed,
        "encoder_ms": 1e3 * encoder,
        "prefill_ms": 1e3 * prefill,
        "decode_ms": 1e3 * decode,
        "decode_rows": rows / replays if replays else None,
    }


def longest(before: Steps, after: Steps) -> Row:
    """By "kind route", the upper bound in ms of the histogram's bucket that the longest step fell into, so that this
    step was at most so long; None past the last bound."""
    bounds: dict[str, float] = {}
    below: dict[str, float] = {}
    more = {tuple(key.rsplit(" ", 1)): steps for key, steps in _more(before.buckets, after.buckets).items()}
    for (step, le), steps in sorted(more.items(), key=lambda item: float(item[0][1])):
        if steps > below.get(step, 0.0):
            below[step], bounds[step] = steps, 1e3 * float(le)
    return {"longest_step_at_most_ms": {step: ms if math.isfinite(ms) else None for step, ms in bounds.items()}}


def _more(before: Samples, after: Samples) -> dict[str, float]:
    return {key: value - before.get(key, 0.0) for key, value in after.items()}
