"""From the results of a step to what clients get of them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from service.engine.chat.scheduler_output import Chunk
from service.link.messages import ChatDelta, PhaseTimes, TokenInfo


def token_infos(results: dict[str, np.ndarray], row: int, count: int | None) -> tuple[TokenInfo, ...]:
    """Log probabilities of a row of StepOutput.results, with `count` alternatives; none if it asked for none."""
    if count is None:
        return ()
    ids, values = results["top_ids"][row, :count].tolist(), results["top_values"][row, :count].tolist()
    return (TokenInfo(float(results["logprobs"][row]), tuple(zip(ids, values, strict=True))),)


def phase_times(chunks: Sequence[Chunk], now: float) -> dict[str, PhaseTimes]:
    """By request id, of those whose first token comes with the last of these chunks."""
    firsts = [chunk.sequence for chunk in chunks if chunk.is_last and not chunk.sequence.generated]
    times = {sequence.request_id: sequence.stats.times(now) for sequence in firsts}
    return {name: of_request for name, of_request in times.items() if of_request is not None}


def with_times(deltas: list[ChatDelta], first: dict[str, PhaseTimes]) -> list[ChatDelta]:
    """The deltas, with their times for the requests in `first`. This is not part of the loop over a step's rows, whose
    cost every token pays."""
    return [
        msgspec.structs.replace(delta, times=first[delta.request_id]) if delta.request_id in first else delta
        for delta in deltas
    ]
