"""Prints the dependencies of a pyproject.toml, one a line: an image layer that the source does not change."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

if __name__ == "__main__":
    project = tomllib.loads(Path(sys.argv[1]).read_text())["project"]
    print("\n".join(project["dependencies"]))
