"""Entry point of the `reprise` command, and `python -m service.cli`."""

from __future__ import annotations

import os
import sys

from service.system.children import ended_by_ctrl_c
from service.system.packages import is_ours, unusable


def open_closed_streams() -> None:
    """Opens /dev/null in place of a standard stream that is closed: Python has None there, and the next file or socket
    would get its number, to which libraries and child processes write."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8", errors="replace"))


def main() -> None:
    open_closed_streams()
    # Only now: what these imports open and keep would get the number of a closed stream (libffi does, on some systems).
    try:
        with ended_by_ctrl_c():
            from service.cli.main import main as command
    except ImportError as error:
        if is_ours(error):
            raise
        sys.exit(f"reprise: {unusable(error.name or '?', error)}")
    command()


if __name__ == "__main__":
    main()
