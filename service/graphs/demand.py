"""Which further bucket is worth capturing: counts the sizes of calls and proposes the bucket that would save the most
padding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from models.interfaces.capturable import Bucket
from service.graphs.buckets import BucketKey, cheapest, fits, key_of, primary_size, round_up

_MIN_CALLS = 16.0
"""Calls before anything is proposed."""
_MIN_GAIN = 0.05
"""Share of the currently computed rows that a new captured graph must save."""
_HALVE_AT = 4096.0
"""Calls after which all counts are halved, so that old demand fades."""
_MAX_ROUNDED = 4096
"""Number of sizes whose rounding is remembered; pictures come in any number of sizes."""


class Demand:
    """Calls by their required sizes, rounded up (`round_up`); old calls count less."""

    def __init__(self, bucket_list: Sequence[Bucket]) -> None:
        self._bucket_list = bucket_list
        self._calls: dict[BucketKey, float] = {}
        self._rounded: dict[BucketKey, BucketKey | None] = {}
        self._total = 0.0

    def note(self, required: Bucket) -> None:
        """Counts one call. Calls larger than every bucket of the list are not counted: no captured graph could serve
        them."""
        exact = key_of(required)
        if exact not in self._rounded:
            if len(self._rounded) >= _MAX_ROUNDED:
                self._rounded.clear()
            rounded = self._round(required)
            self._rounded[exact] = None if rounded is None else key_of(rounded)
        key = self._rounded[exact]
        if key is None:
            return
        self._calls[key] = self._calls.get(key, 0.0) + 1.0
        self._total += 1.0
        if self._total > _HALVE_AT:
            self._calls = {key: calls / 2 for key, calls in self._calls.items() if calls >= 1.0}
            self._total = sum(self._calls.values())

    def propose(self, captured: Iterable[Bucket], unavailable: Iterable[Bucket]) -> Bucket | None:
        """The bucket that would save the most padded rows; None when none would save a twentieth of all rows.

        A call that runs eagerly now counts double.
        """
        if self._total < _MIN_CALLS:
            return None
        captured = list(captured)
        barred = {key_of(bucket) for bucket in (*captured, *unavailable)}
        calls = [(dict(key), count) for key, count in self._calls.items()]
        now = [_size(cheapest(captured, required)) or 2 * _size(required) for required, _ in calls]
        best, best_gain = None, _MIN_GAIN * sum(size * count for size, (_, count) in zip(now, calls, strict=True))
        for candidate, _ in calls:
            if key_of(candidate) in barred:
                continue
            gain = sum(
                max(0, size - _size(candidate)) * count
                for size, (required, count) in zip(now, calls, strict=True)
                if fits(candidate, required)
            )
            if gain > best_gain:
                best, best_gain = candidate, gain
        return best

    def _round(self, required: Bucket) -> Bucket | None:
        """`required` with its primary size rounded up, and with the other sizes of the next larger bucket of the list,
        so that a captured graph also serves calls of similar sizes."""
        bucket = cheapest(self._bucket_list, required)
        if bucket is None:
            return None
        name = primary_size(bucket)
        return dict(bucket) | {name: min(bucket[name], round_up(required[name]))}


def _size(bucket: Bucket | None) -> int:
    return bucket[primary_size(bucket)] if bucket else 0
