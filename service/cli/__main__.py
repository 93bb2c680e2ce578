"""Entry point of the `reprise` command, and `python -m service.cli`."""

from __future__ import annotations

import sys

from service.cli.standard_streams import open_closed_streams
from service.system.children import ended_by_ctrl_c
from service.system.packages import is_ours, unusable


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
