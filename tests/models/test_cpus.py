"""How many processors a process may use."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.interfaces import cpus


def _files(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"}, 1.5),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        # A parent's limit holds for its children.
        (
            {
                "proc/self/cgroup": "0::/a.slice/b.service\n",
                "sys/fs/cgroup/a.slice/b.service/cpu.max": "400000 100000\n",
                "sys/fs/cgroup/a.slice/cpu.max": "300000 100000\n",
                "sys/fs/cgroup/cpu.max": "max 100000\n",
            },
            3.0,
        ),
        # A container of version 2 that sees its own group as the root, its path as the host names it.
        ({"proc/self/cgroup": "0::/docker/0123\n", "sys/fs/cgroup/cpu.max": "50000 100000\n"}, 0.5),
        (
            {
                "proc/self/cgroup": "5:memory:/x\n4:cpu,cpuacct:/docker/0123\n0::/\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "250000\n",
                "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            2.5,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
        # Version 2 beside version 1's controllers.
        (
            {
                "proc/self/cgroup": "1:name=systemd:/\n0::/user\n",
                "sys/fs/cgroup/unified/user/cpu.max": "200000 100000\n",
            },
            2.0,
        ),
    ],
)
def test_the_quota_of_the_control_groups(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    assert cpus.group_quota(_files(tmp_path, files)) == quota


@pytest.mark.parametrize(("quota", "count"), [(None, 6), (0.5, 1), (2.5, 2), (64.0, 6)])
def test_processors_by_affinity_and_quota(monkeypatch: pytest.MonkeyPatch, quota: float | None, count: int) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(6)))
    monkeypatch.setattr(cpus, "group_quota", lambda: quota)
    assert cpus.available() == count
