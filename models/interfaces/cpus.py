"""How many processors this process may use: its affinity and the quota of its control groups of version 2
(cpu.max in Documentation/admin-guide/cgroup-v2.rst of Linux). Torch-free."""

from __future__ import annotations

import os
from pathlib import Path


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
    """Processors that the control group of this process and its parents allow: the smallest quota; None: no limit.
    root: holds proc/self/cgroup and sys/fs/cgroup.

    A container may see its own group as the mount itself, while the path is the one on the host, so folders may be
    missing: they hold no files."""
    lines = (_text(root / "proc/self/cgroup") or "").splitlines()
    groups = [Path(line.removeprefix("0::/")) for line in lines if line.startswith("0::")]
    folders = [root / "sys/fs/cgroup" / folder for group in groups for folder in (group, *group.parents)]
    return min((quota for quota in map(_quota, folders) if quota is not None), default=None)


def _quota(folder: Path) -> float | None:
    """ "200000 100000" -> 2.0; "max 100000" -> None."""
    quota, _, period = (_text(folder / "cpu.max") or "max").strip().partition(" ")
    return None if quota == "max" else int(quota) / int(period or 100_000)


def _text(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:  # no such group, another version, or no Linux
        return None
