"""Makes child processes run Reprise's own code: nothing from the current directory, and no other packages of the same
name."""

from __future__ import annotations

import os
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping
from importlib.machinery import PathFinder
from pathlib import Path

PACKAGE_ROOT = Path(__file__).resolve().parents[2]
"""Holds `models` and `service`: the checkout, or where the package is installed."""
REQUIRED = ("av", "fastapi", "msgspec", "numpy", "PIL", "pydantic", "safetensors", "tokenizers", "torch", "uvicorn")
"""Packages to warn about if a file on PYTHONPATH replaces them."""
PYTHON = shlex.quote(sys.executable)
"""This interpreter, quoted for a shell, for advice in messages. Processes are started with `python_command`."""
LAUNCHER = PACKAGE_ROOT / "service" / "launch.py"


def python_command(module: str, *arguments: str) -> list[str]:
    """`python -m MODULE ARGUMENT ...` without the current directory, with the packages of this process. Start it with
    `python_environment`."""
    return [sys.executable, "-P", str(LAUNCHER), module, *arguments]


def python_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """`environ` without the entries of PYTHONPATH that depend on the current directory: empty and relative paths."""
    kept = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if os.path.isabs(path)]
    others = {name: value for name, value in environ.items() if name != "PYTHONPATH"}
    return others | ({"PYTHONPATH": os.pathsep.join(kept)} if kept else {})


def working_directory() -> str | None:
    """That of child processes: this process's own (None), or /, if that was deleted. MKL cannot be loaded there."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return "/"
    return None


def leave_signals_to_parent() -> None:
    """Ignores the signals that ask the server to end. A service manager may send them to all of its processes, and this
    one still has work while the server drains. It ends with its parent, or is killed by it."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def wait_for_end_of_parent() -> None:
    """Waits until standard input, a pipe that only the parent process writes to, is closed."""
    # Not through sys.stdin.buffer: a thread that waits in it holds a lock that the interpreter needs to exit.
    while os.read(0, 4096):
        pass


def shadowing_packages() -> Iterator[Path]:
    """Files of other packages called `models` or `service` that Python would find before Reprise's."""
    ahead = []
    for entry in sys.path:
        if Path(entry).resolve() == PACKAGE_ROOT:
            break
        ahead.append(entry)
    for name in ("models", "service"):
        spec = PathFinder.find_spec(name, ahead)
        if spec is not None and spec.origin is not None:  # a folder without __init__.py is found after every package
            yield Path(spec.origin)


def hidden_by_python_path() -> Iterator[Path]:
    """Files on PYTHONPATH that Python finds before an installed package of the same name."""
    named = python_environment().get("PYTHONPATH", "").split(os.pathsep)
    installed = [entry for entry in sys.path if os.path.isabs(entry) and entry not in named]
    for name in REQUIRED:
        spec = PathFinder.find_spec(name, named)
        if spec is not None and spec.origin is not None and PathFinder.find_spec(name, installed) is not None:
            yield Path(spec.origin)
