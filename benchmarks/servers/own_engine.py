"""`reprise serve` with an engine of a benchmark's own."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from service.cli import main as cli
from service.link.engine_link import ProcessLink
from service.processes import engines, server


def serve_with(entry: str, arguments: Sequence[str]) -> None:
    """`reprise serve` with these arguments, whose engines run `entry` ("module:function", an EngineEntry)."""
    os.environ["REPRISE_STANDBY"] = "off"  # Such a process would be an engine of the package.
    server.link_maker = lambda settings, config, standby: lambda: ProcessLink(config, entry)
    engines.shared_link = lambda config, standby: ProcessLink(config, entry, shared=True)
    sys.argv[1:] = ["serve", *arguments]
    cli.main()
