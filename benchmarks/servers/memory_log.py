"""What a server's log says of the GPU's memory: as planned, taken by captured graphs, and missing."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator

from benchmarks.measure.record import Row

LONGEST_LINE = 300
"""Characters that are kept of a line."""
_PLANNED = r"memory: (\d+) bytes in use, (\d+) workspace, (\d+) graphs, (\d+) slot state, (\d+) left for pages"
_CAPTURED = r"captured (\S+) at ({.*?}): (\S+) MiB more"
_REFUSED = r"capture of (\S+) at ({.*?}) refused, .*?(\d+) bytes"


def memory_facts(log: str) -> Row:
    """planned_bytes: by use. captured_mib: what each graph took, by the name of its forward and its bucket.
    refused_mib: what others would have taken, by kind of step and bucket. out_of_memory_lines: those that say so."""
    lines = list(_lines(log))
    planned = next((found for line in lines if (found := re.search(_PLANNED, line))), None)
    uses = ("used", "workspace", "graphs", "state", "pages")
    return {
        "planned_bytes": dict(zip(uses, map(int, planned.groups()), strict=True)) if planned else None,
        "captured_mib": {_graph(found): float(found[3]) for line in lines if (found := re.search(_CAPTURED, line))},
        "refused_mib": {
            _graph(found): round(int(found[3]) / 2**20, 1) for line in lines if (found := re.search(_REFUSED, line))
        },
        "out_of_memory_lines": [line[:LONGEST_LINE] for line in lines if "out of memory" in line],
    }


def _lines(log: str) -> Iterator[str]:
    """The lines of messages and of the errors with them, of a log in either format."""
    for line in log.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            entry = None
        if isinstance(entry, dict):
            yield from f"{entry.get('message')}\n{entry.get('exception', '')}".splitlines()
        else:
            yield line


def _graph(found: re.Match[str]) -> str:
    """ "decode rows=8 pages=256"."""
    return " ".join([found[1], *(f"{name}={size}" for name, size in ast.literal_eval(found[2]).items())])
