"""python -m benchmarks.kernels [gemms|routed|e4m3 ...] [--only NAME] [--out FOLDER]

`routed` reads what `gemms` wrote to the folder. `python -m benchmarks.kernels.choose` makes tables of the results."""

from __future__ import annotations

import importlib
from functools import partial
from pathlib import Path

from benchmarks.kernels.timing import compile_all, measure, named, write
from benchmarks.measure.command_line import command_line

NAMES = ("gemms", "routed", "e4m3")


def main() -> None:
    parser = command_line("benchmarks.kernels", __doc__)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--only", metavar="NAME", help="a group or a stack, written to a file of its own")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/kernels"))
    parser.add_argument("--compile-only", action="store_true", help="fill Triton's cache on disk, measure nothing")
    parser.add_argument("--compiled", action="store_true", help="the cache is filled already")
    arguments = parser.parse_args()
    for name in arguments.names:
        cases = importlib.import_module(f"benchmarks.kernels.{name}").cases
        if name == "routed":
            cases = partial(cases, arguments.out)
        if arguments.only:
            cases = partial(named, cases, arguments.only)
            name = f"{name}_{arguments.only.replace(' ', '_')}"
        if not arguments.compiled:
            compile_all(cases)
        if not arguments.compile_only:
            write(name, measure(cases()), arguments.out)


if __name__ == "__main__":
    main()
