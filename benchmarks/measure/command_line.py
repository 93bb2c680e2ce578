"""The command lines of benchmarks."""

from __future__ import annotations

import argparse


def command_line(module: str, description: str | None) -> argparse.ArgumentParser:
    """Parser of `python -m MODULE`, whose help keeps the lines of `description`."""
    return argparse.ArgumentParser(
        prog=f"python -m {module}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
