"""The gap between two tokens of decode rows: how much other work may run in it."""

from __future__ import annotations

import math

_AIM = 0.9
"""Share of the target that predictions may fill; the rest allows for their errors."""
_MIN_DECODE_RATE = 0.15
"""Decode rows keep at least this share of their token rate, however long the target is."""
_MIN_OTHER_SHARE = 1 / 3
"""Other work gets at least this share of the time, however little the target leaves."""

_MAX_PUT_OFF = 3
"""Gaps in a row in which other work is put off for launches of other models."""


class Gaps:
    """Seconds of encoder passes and prefill chunks between the tokens of decode rows.

    A gap has room up to the target for the inter-token latency, or up to where the rows would fall below
    _MIN_DECODE_RATE, but always for _MIN_OTHER_SHARE, so that prompts make progress even when the rows leave no time.
    Work that cannot be cut to the room may run once nothing is owed. The excess over the room is then owed, and the
    following gaps pay it back.

    Launches of other models on the GPU fall into a gap, too, and leave less room in it. What is put off for them is due
    in the next gap. If they cannot wait and take that one as well, and the next, it runs nevertheless.
    """

    def __init__(self, target: float | None) -> None:
        """target: seconds; None: no limit."""
        self._target = target
        self._spent = 0.0
        self._owed = 0.0
        self._taken = 0.0
        self._put_off = 0
        """Number of last gaps in which other models launched and work was put off."""

    @property
    def paced(self) -> bool:
        return self._target is not None

    @property
    def due(self) -> bool:
        """Whether other models should leave the rest of this gap alone: work is due in it, or was launched."""
        return self._put_off > 0 or self._spent > 0

    @property
    def free(self) -> bool:
        """Nothing was spent in this gap, and nothing is owed; nothing was taken that counts."""
        return not self._spent and not self._owed and not self._counted

    def room(self, decode_seconds: float) -> float:
        """Seconds that are left in this gap beside a decode step of `decode_seconds` (0: not measured yet)."""
        return max(0.0, self._whole(decode_seconds) - self._spent - self._owed - self._counted)

    def spend(self, seconds: float) -> None:
        """Records that other work was launched."""
        if self.paced:
            self._spent += seconds

    def others_launched(self, seconds: float) -> None:
        """Records a launch of another model."""
        if self.paced:
            self._taken += seconds

    def close(self, decode_seconds: float, *, put_off: bool = False) -> None:
        """Ends the gap, since the next tokens of the rows were launched. decode_seconds: 0 without rows, in which case
        nothing is owed. put_off: work that might have run in this gap is waiting."""
        self._put_off = self._put_off + 1 if put_off and self._taken > 0 and decode_seconds > 0 else 0
        self._taken = 0.0
        if self._spent or self._owed:
            self._owed = max(0.0, self._owed + self._spent - self._whole(decode_seconds)) if decode_seconds else 0.0
            self._spent = 0.0

    @property
    def _counted(self) -> float:
        """Seconds that other models took of this gap, unless they took too many before."""
        return self._taken if self._put_off < _MAX_PUT_OFF else 0.0

    def _whole(self, decode_seconds: float) -> float:
        """Seconds that a gap has for other work, before any are spent."""
        if self._target is None:
            return math.inf
        limit = _AIM * self._target
        at_least = decode_seconds * _MIN_OTHER_SHARE / (1 - _MIN_OTHER_SHARE)
        room = min(limit, decode_seconds / _MIN_DECODE_RATE if decode_seconds else limit) - decode_seconds
        return max(at_least, room)
