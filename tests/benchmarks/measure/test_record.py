"""Results as they are written."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.measure.record import record


def test_a_run_that_is_cut_short_leaves_what_it_has_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))

    def measured() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
        yield {"rate": 40, "value": 1}, {"hits": 0}
        yield {"rate": 20, "value": 2}, {"hits": 1}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record("some_run", measured(), model="some model")
    written = json.loads((tmp_path / "some_run.json").read_text())
    assert [row["rate"] for row in written["rows"]] == [20, 40]
    assert (written["model"], written["hits"]) == ("some model", 1)
