"""How many processors a process may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.interfaces import cpus
from tests.support.rows import rows


def _files(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_quota_of_the_control_groups(tmp_path: Path) -> None:
    for number, case in enumerate(rows(__file__, "quotas.jsonl")):
        assert cpus.group_quota(_files(tmp_path / str(number), case["files"])) == case["quota"], case


@pytest.mark.parametrize(("quota", "count"), [(None, 6), (0.5, 1), (2.5, 2), (64.0, 6)])
def test_processors_by_affinity_and_quota(monkeypatch: pytest.MonkeyPatch, quota: float | None, count: int) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(6)))
    monkeypatch.setattr(cpus, "group_quota", lambda: quota)
    assert cpus.available() == count
