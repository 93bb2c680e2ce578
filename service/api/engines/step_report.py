"""Reports in answers how the engine computed a request."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from service.link.messages import StepCounts


class StepReport(msgspec.Struct, frozen=True):
    """total: steps that included the request, all choices together. replayed: those that replayed a captured graph; the
    others ran eagerly. batch_size: average number of rows of its steps, its own included. encoded_media: number of its
    pictures and videos that went through the vision encoder; the others were in a cache."""

    total: int
    replayed: int
    batch_size: float
    encoded_media: int


def step_report(counts: Sequence[StepCounts]) -> StepReport | UnsetType:
    """The report for the choices of a request; UNSET before any has ended."""
    total = sum(one.steps for one in counts)
    if not total:
        return UNSET
    return StepReport(
        total,
        sum(one.replayed for one in counts),
        round(sum(one.rows for one in counts) / total, 2),
        sum(one.encoded_media for one in counts),
    )
