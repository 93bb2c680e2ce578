"""Reading of benchmarks/results: our files by name, and the peers' raw lines."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.measure.record import RESULTS

PEERS = "peers_h100.jsonl"


class Missing(LookupError):
    """A result that has not been measured, or was measured before its rows had a field."""

    def __init__(self, name: str, field: str = "") -> None:
        super().__init__(f"{name}.json has no {field}" if field else f"{name}.json is not measured")


@dataclass(frozen=True)
class Result:
    """rows and the facts beside them (time, commit, device, versions, ...)."""

    name: str
    facts: dict[str, Any]
    rows: list[dict[str, Any]]

    def row(self, **wanted: Any) -> dict[str, Any]:
        """The first row with these values; Missing without one, or when its requests did not succeed."""
        for row in self.rows:
            if all(row.get(key) == value for key, value in wanted.items()) and row.get("succeeded", 1):
                return row
        raise Missing(self.name)

    @property
    def source(self) -> str:
        """One line of Markdown: where the rows come from."""
        device, versions = self.facts["device"]["name"], self.facts["versions"]
        commit, day = self.facts["commit"][:7], self.facts["time"][:10]
        return f"`{self.name}.json`: {device}, torch {versions['torch']}, commit {commit}, {day}"


@dataclass(frozen=True)
class Results:
    folder: Path = RESULTS

    def __getitem__(self, name: str) -> Result:
        """Raises Missing."""
        path = self.folder / f"{name}.json"
        if not path.exists():
            raise Missing(name)
        facts = json.loads(path.read_text())
        rows = facts.pop("rows")
        return Result(name, facts, rows)

    def variants(self, name: str) -> list[Result]:
        """`name`, where it is measured, and every `name_...`."""
        paths = [self.folder / f"{name}.json", *sorted(self.folder.glob(f"{name}_*.json"))]
        return [self[path.stem] for path in paths if path.exists()]

    def peer(self, engine: str, metric: str, **wanted: Any) -> dict[str, Any]:
        """The line of `engine` for `metric` that has these values; LookupError unless there is exactly one."""
        found = [
            line
            for line in self._peer_lines()
            if line.get("peer") == engine
            and line.get("metric") == metric
            and all(line.get(key) == value for key, value in wanted.items())
        ]
        if len(found) != 1:
            raise LookupError(f"{engine} has {len(found)} lines for {metric} with {wanted}")
        return found[0]

    def peer_value(self, engine: str, metric: str, **wanted: Any) -> float:
        return float(self.peer(engine, metric, **wanted)["value"])

    def peer_fact(self, engine: str, key: str) -> str:
        """The one value that the notes of `engine` have for `key`, such as its GPU; LookupError unless there is one."""
        notes = [line.get("note") for line in self._peer_lines() if line.get("peer") == engine]
        found = {note[key] for note in notes if isinstance(note, dict) and key in note}
        if len(found) != 1:
            raise LookupError(f"{engine} has {sorted(found)} for {key}")
        return str(*found)

    def _peer_lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / PEERS).read_text().splitlines()]
