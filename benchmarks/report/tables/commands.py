"""The table of benchmarks/README.md: every result, its command, and the commit that it was measured at."""

from __future__ import annotations

from benchmarks.commands import COMMANDS
from benchmarks.report.formatting import markdown
from benchmarks.report.results import Missing, Results


def commands(results: Results) -> str:
    def state(name: str) -> list[str]:
        try:
            facts = results[name].facts
        except Missing:
            return ["not yet", ""]
        return [facts["time"][:10], facts["commit"][:7]]

    rows = []
    for c in COMMANDS:
        peers = f"`{c.with_peers}`" if c.peers else ""
        rows.append(
            [
                f"{c.what}, on a CPU" if c.on_cpu else c.what,
                f"`{c.command}`",
                peers,
                f"`{c.result}.json`",
                *state(c.result),
            ]
        )
    return markdown(["what", "command", "with the peers that are installed", "result", "measured", "commit"], rows)
