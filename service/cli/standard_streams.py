"""Standard streams that were closed before the command began."""

from __future__ import annotations

import os
import sys


def open_closed_streams() -> None:
    """Opens /dev/null in place of a standard stream that is closed: Python has None there, and the next file or socket
    would get its number, to which libraries and child processes write."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8", errors="replace"))
