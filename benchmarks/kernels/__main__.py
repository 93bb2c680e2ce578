"""python -m benchmarks.kernels [linear_layers|attention|vae|stacks ...] [--out FOLDER]"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from benchmarks.kernels.timing import compile_all, measure, write

NAMES = ("linear_layers", "attention", "vae", "stacks")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/kernels"))
    parser.add_argument("--compile-only", action="store_true", help="fill Triton's cache on disk, measure nothing")
    parser.add_argument("--compiled", action="store_true", help="the cache is filled already")
    arguments = parser.parse_args()
    benches = {name: importlib.import_module(f"benchmarks.kernels.{name}").cases for name in arguments.names}
    if not arguments.compiled:
        for cases in benches.values():
            compile_all(cases)
    if not arguments.compile_only:
        for name, cases in benches.items():
            write(name, measure(cases()), arguments.out)


if __name__ == "__main__":
    main()
