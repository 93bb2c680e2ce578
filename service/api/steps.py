"""What the engine did for a request, as answers report it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from service.link.messages import StepCounts


class StepReport(msgspec.Struct, frozen=True):
    """total: steps that took the request along, all choices together; replayed: those of captured graphs, the others
    ran eagerly. batch_size: rows of its steps, on average, its own included. encoded_media: its pictures and videos
    that went through the vision encoder; the others were in a cache."""

    total: int
    replayed: int
    batch_size: float
    encoded_media: int


def step_report(counts: Sequence[StepCounts]) -> StepReport | UnsetType:
    """Of the choices of a request; UNSET before any has ended."""
    total = sum(one.steps for one in counts)
    if not total:
        return UNSET
    return StepReport(
        total,
        sum(one.replayed for one in counts),
        round(sum(one.rows for one in counts) / total, 2),
        sum(one.encoded_media for one in counts),
    )
