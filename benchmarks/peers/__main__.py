"""Measures other engines where they are installed, each in a process of its own, on our workloads.

    python -m benchmarks.peers transformers|voxcpm|nano_vllm_voxcpm|vllm ... [--with RESULT] [--tiny]

Random weights at full size; --tiny takes a miniature. Each writes peers_NAME.json. --with runs our own command for that
result first, so that both sides come from one machine in one run.
"""

from __future__ import annotations

import importlib
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.commands import BY_RESULT
from benchmarks.measure.command_line import command_line
from benchmarks.measure.record import table, version_of, write

PACKAGES = {"transformers": "transformers", "voxcpm": "voxcpm", "nano_vllm_voxcpm": "nano-vllm-voxcpm", "vllm": "vllm"}
"""Name of the adapter and of the package on the index."""


def measure(name: str, tiny: bool) -> None:
    package = PACKAGES[name]
    version = version_of(package)
    with tempfile.TemporaryDirectory() as folder:
        rows = importlib.import_module(f"benchmarks.peers.{name}").measure(Path(folder), tiny)
    write(f"peers_{name}{'_tiny' if tiny else ''}", rows, peer=package, peer_version=version)
    print(f"{package} {version}")
    print(table(rows))


def main(words: Sequence[str] | None = None) -> None:
    parser = command_line("benchmarks.peers", __doc__)
    parser.add_argument("names", nargs="+", choices=PACKAGES)
    parser.add_argument("--with", dest="result", choices=BY_RESULT)
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args(words)
    extra = ["--tiny"] if arguments.tiny else []
    if arguments.tiny and arguments.result and "http" not in arguments.result:
        parser.error(f"{arguments.result} has no miniature")
    if arguments.result:
        command = shlex.split(BY_RESULT[arguments.result].command)
        subprocess.run([sys.executable, *command[1:], *extra], check=True)
    for name in arguments.names:
        if version_of(PACKAGES[name]) is None:
            print(f"{PACKAGES[name]}: not installed")
        elif len(arguments.names) > 1:
            subprocess.run([sys.executable, "-m", "benchmarks.peers", name, *extra], check=False)
        else:
            measure(name, arguments.tiny)


if __name__ == "__main__":
    main()
