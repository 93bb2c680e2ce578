"""Fields of requests that nothing here reads, in the log."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import msgspec

log = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
HINTS = frozenset(
    (
        *("cache_prompt", "keep_alive", "metadata", "models", "name", "prediction", "priority", "prompt_cache_key"),
        *("prompt_cache_retention", "provider", "reasoning_effort", "request_id", "route", "safety_identifier"),
        *("service_tier", "session_id", "store", "usage", "user", "verbosity"),
    )
)
"""Fields that clients send by habit and that need no warning: no model here gives another answer for them."""
MAX_NAMES = 100
"""Names that are logged in the life of a process: clients choose them."""


def unread_fields(raw: bytes, kind: Any) -> list[str]:
    """Names at the top level of a valid body that `kind` does not have and are not null."""
    fields = msgspec.json.decode(raw.removeprefix(b"\xef\xbb\xbf"), type=dict[str, msgspec.Raw])
    known = kind.__struct_fields__
    return [
        name for name, value in fields.items() if name not in known and name not in HINTS and bytes(value) != b"null"
    ]


@dataclass(eq=False)
class FieldWarnings:
    """Logs each name once, so that a typo such as max_token is found and a busy client does not fill the log."""

    _logged: set[tuple[str, str]] = field(default_factory=set)

    def warn(self, where: str, names: Iterable[str]) -> None:
        """where: the path or event that has the fields."""
        for name in names:
            if (where, name) not in self._logged and len(self._logged) < MAX_NAMES and NAME.fullmatch(name):
                self._logged.add((where, name))
                log.warning("%s: the field %s is ignored: nothing here reads it", where, name)
