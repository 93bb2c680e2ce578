"""Fills the figures of the documentation from benchmarks/results, and draws the plots.

    python -m benchmarks.report [--check]

A region of README.md, docs/*.md or benchmarks/README.md between `<!-- figures: NAME -->` and `<!-- /figures -->` is
replaced by the table or plot of that name, so that no figure is typed by hand. --check writes nothing and fails if a
region or a plot does not match the results. Plots need the extra `report` (matplotlib).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.measure.command_line import command_line
from benchmarks.report.documents import ROOT, stale, write
from benchmarks.report.results import Results


def main(words: Sequence[str] | None = None) -> None:
    parser = command_line("benchmarks.report", __doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args(words).check
    changed = stale(ROOT, Results()) if check else write(ROOT, Results())
    for path in changed:
        print(("stale: " if check else "written: ") + str(path.relative_to(ROOT)))
    if check and changed:
        sys.exit("run `python -m benchmarks.report`")


if __name__ == "__main__":
    main()
