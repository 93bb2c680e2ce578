"""The installed package. `models` and `service` lie inside this folder, not beside it, where they would meet packages
of the same names; a checkout is installed with `pip install -e`.

Once this is imported, `models` and `service` are Reprise's own.
"""

from __future__ import annotations

import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
ROOT = _HERE if (_HERE / "service").is_dir() else _HERE.parents[2]
"""Holds `models` and `service`."""

sys.path.insert(0, str(ROOT))


def main() -> None:
    """Entry point of the `reprise` command."""
    try:
        from service.cli.__main__ import main as command

        command()
    except KeyboardInterrupt:  # Ctrl-C during the imports; commands handle their own
        sys.exit(130)
