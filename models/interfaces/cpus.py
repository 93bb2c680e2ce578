"""How many processors this process may use: its affinity and the quota of its control groups. Torch-free.

cpu.max of version 2, cpu.cfs_quota_us and cpu.cfs_period_us of version 1 (Documentation/admin-guide/cgroup-v2.rst and
Documentation/scheduler/sched-bwc.rst of Linux).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_VERSION_1_MOUNTS = ("cpu", "cpu,cpuacct", "cpuacct,cpu")


def available() -> int:
    """Processors that may be used at the same time, at least 1. A quota of 2.5 gives 2: a third thread would stop all
    of them until the next period."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = group_quota()
    return count if quota is None else max(1, min(count, int(quota)))


def default_threads() -> int:
    """Half of the CPUs that may be used, from 2 to 8, or 1 if there is only one: the engine and the decode workers need
    the others."""
    return min(8, max(2, available() // 2), available())


def group_quota(root: Path = Path("/")) -> float | None:
    """Processors that the control groups of this process allow: the smallest quota of them and their parents; None: no
    limit. root: holds proc/self/cgroup and sys/fs/cgroup."""
    quotas = [quota for quota in _quotas(root) if quota is not None]
    return min(quotas, default=None)


def _quotas(root: Path) -> Iterator[float | None]:
    mounts = root / "sys/fs/cgroup"
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        number, controllers, group = line.split(":", 2)
        if number == "0":
            for mount in (mounts, mounts / "unified"):
                yield from (_version_2_quota(folder) for folder in _with_parents(mount, group))
        elif "cpu" in controllers.split(","):
            for name in _VERSION_1_MOUNTS:
                yield from (_version_1_quota(folder) for folder in _with_parents(mounts / name, group))


def _with_parents(mount: Path, group: str) -> Iterator[Path]:
    """A container may see its own group as the mount itself, while the path is the one on the host, so folders may be
    missing: they hold no files."""
    folder = mount / group.lstrip("/")
    yield folder
    while folder != mount and mount in folder.parents:
        folder = folder.parent
        yield folder


def _version_2_quota(folder: Path) -> float | None:
    """ "200000 100000" -> 2.0; "max 100000" -> None."""
    quota, _, period = (_text(folder / "cpu.max") or "max").strip().partition(" ")
    return None if quota == "max" else int(quota) / int(period or 100_000)


def _version_1_quota(folder: Path) -> float | None:
    quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
    if quota is None or period is None or int(quota) <= 0:
        return None
    return int(quota) / int(period)


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:  # no such group, another version, or no Linux
        return None
