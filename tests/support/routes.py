"""For tests that require a replay: on a GPU that other tests share, an eager pass may be measured to be faster."""

from __future__ import annotations

import pytest

from service.graphs.pool import RouteSeconds


@pytest.fixture
def replayed_if_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a captured graph holds is replayed, whatever was measured at its capture."""
    monkeypatch.setattr(RouteSeconds, "faster", lambda seconds: "replay")
