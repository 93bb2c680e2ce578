"""python -m benchmarks.kernels [linear_layers|attention|vae|stacks ...] [--out FOLDER]"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from benchmarks.kernels.timing import compile_all, measure, write

NAMES = ("linear_layers", "attention", "vae", "stacks")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=NAMES, choices=NAMES)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/kernels"))
    arguments = parser.parse_args()
    for name in arguments.names:
        cases = importlib.import_module(f"benchmarks.kernels.{name}").cases
        compile_all(cases)
        write(name, measure(cases()), arguments.out)


if __name__ == "__main__":
    main()
