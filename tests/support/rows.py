"""Cases as data: a JSON value on each line of a file beside the test that reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def rows(test: str, name: str) -> list[Any]:
    """test: __file__ of the test."""
    return [json.loads(line) for line in Path(test).with_name(name).read_text("utf-8").splitlines()]
