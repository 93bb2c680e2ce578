"""Results as JSON: rows with the hardware, the versions and the commit that gave them."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import subprocess
import time
import timeit
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch

Row = dict[str, Any]

RESULTS = Path(__file__).parents[1] / "results"
PACKAGES = ("triton", "transformers", "numpy", "pillow", "fastapi", "uvicorn", "msgspec", "pyzmq", "av")
"""Whose versions a result names, beside those of python and torch; a missing package is null."""


def write(name: str, rows: list[Row], **facts: Any) -> Path:
    """Write `name`.json to the folder $OUT, or to benchmarks/results without it."""
    path = folder() / f"{name}.json"
    path.write_text(json.dumps({"name": name, **environment(), **facts, "rows": rows}, indent=1) + "\n")
    return path


def record(name: str, measured: Iterable[tuple[Row, dict[str, Any]]], **facts: Any) -> Path:
    """Print and `write` rows as they come, by rate where they have one, with the facts of the last: a run that is cut
    short leaves what it has measured."""
    rows: list[Row] = []
    latest: dict[str, Any] = {}
    path = folder() / f"{name}.json"
    for row, latest in measured:
        rows = sorted([*rows, row], key=lambda one: one.get("rate", 0.0))
        print(table([row]), flush=True)
        path = write(name, rows, **facts, **latest)
    print(latest)
    print(table(rows))
    return path


def folder() -> Path:
    """Where results go; it exists."""
    chosen = Path(os.environ.get("OUT") or RESULTS)
    chosen.mkdir(parents=True, exist_ok=True)
    return chosen


def environment() -> dict[str, Any]:
    device: dict[str, Any] = {"name": platform.processor() or platform.machine()}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        device = {"name": properties.name, "memory_bytes": properties.total_memory}
        device["multiprocessors"] = properties.multi_processor_count
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit(),
        "device": device,
        "cpus": os.cpu_count(),
        "processor": _processor(),
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            **{name: version_of(name) for name in PACKAGES},
        },
    }


@cache
def _processor() -> dict[str, Any]:
    """Its name, and the milliseconds of a fixed piece of Python: hosts of one GPU differ, as does their load."""
    listed = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    named = re.search(r"^model name\s*: (.*)$", listed, re.MULTILINE)
    loop = min(timeit.repeat("for i in range(1_000_000): pass", number=1, repeat=5))
    return {"name": named[1] if named else platform.processor(), "loop_ms": round(loop * 1e3, 2)}


def version_of(package: str) -> str | None:
    """Of an installed package; None without it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str:
    """The commit under test, REPRISE_COMMIT where the tree was copied without its history."""
    if commit := os.environ.get("REPRISE_COMMIT"):
        return commit
    command = ["git", "rev-parse", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=RESULTS.parent, check=False)
    return done.stdout.strip() or "unknown"


def table(rows: list[Row]) -> str:
    """Rows as aligned text, floats with three decimals; of rows in a row, their number."""
    if not rows:
        return "(no rows)"
    keys = list(dict.fromkeys(key for row in rows for key in row))
    text = [[_cell(row.get(key, "")) for key in keys] for row in rows]
    widths = [max(len(key), *(len(line[i]) for line in text)) for i, key in enumerate(keys)]
    lines = [keys, *text]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def _cell(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return str(len(value))
    return f"{value:.3f}" if isinstance(value, float) else str(value)
