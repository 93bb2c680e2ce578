"""Runs the commands behind the results one after the other, each in its own process.

    python -m benchmarks                                 # all of benchmarks/README.md's table
    python -m benchmarks speech_steps startup_voxcpm2    # these results, in this order
    python -m benchmarks --minutes 9                     # as many as fit

Output of each goes to <result>.log beside its JSON. Without a GPU only what needs none is run.
"""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial

import torch

from benchmarks.commands import BY_RESULT, Command
from benchmarks.measure.command_line import command_line
from benchmarks.measure.record import folder

LEAST_SECONDS = 20.0
"""Seconds. With less time left, no further command is started."""
TAIL_LINES = 12


def main(arguments: Sequence[str] | None = None) -> int:
    """0 when every command ran to its end."""
    parser = command_line("benchmarks", __doc__)
    parser.add_argument("results", nargs="*", metavar="result", help="stems of benchmarks/README.md's results")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="for all of them together")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.results if name not in BY_RESULT]:
        parser.error(f"unknown result {unknown[0]!r}; known are {', '.join(BY_RESULT)}")
    deadline = time.monotonic() + 60 * options.minutes
    outcomes = [run(BY_RESULT[name], deadline) for name in options.results or BY_RESULT]
    return 0 if all(outcomes) else 1


def run(command: Command, deadline: float) -> bool:
    """Runs one command until `deadline` (time.monotonic) at most and prints how it ended."""
    if not (command.on_cpu or torch.cuda.is_available()):
        print(f"{command.result}: not measured, it needs a GPU", flush=True)
        return False
    if (left := deadline - time.monotonic()) < LEAST_SECONDS:
        print(f"{command.result}: no time left", flush=True)
        return False
    log = folder() / f"{command.result}.log"
    began = time.monotonic()
    python, *words = shlex.split(command.command)
    assert python == "python"
    with log.open("wb") as file:
        # In the background of a shell interrupts are ignored, and the command would inherit that.
        hears = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        process = subprocess.Popen([sys.executable, *words], stdout=file, stderr=subprocess.STDOUT, preexec_fn=hears)
        try:
            outcome = f"exit status {process.wait(None if left == float('inf') else left)}"
        except subprocess.TimeoutExpired:
            # Like an interrupt from the keyboard: the command ends the servers and clients that it started.
            process.send_signal(signal.SIGINT)
            process.wait()
            outcome = "cut short"
    print(f"{command.result}: {outcome}, {time.monotonic() - began:.0f} s", flush=True)
    lines = log.read_text(errors="replace").splitlines()
    print("\n".join(f"    {line}" for line in lines[-TAIL_LINES:]), flush=True)
    return process.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
