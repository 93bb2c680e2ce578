"""A talker of a few hundred thousand parameters, for tests that need many steps and no speech."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache
from pathlib import Path

from benchmarks.checkpoints import miniature_talker


@cache
def talker() -> Path:
    """The directory of its checkpoint, which lives as long as this process."""
    folder = Path(tempfile.mkdtemp(prefix="reprise-miniature-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    miniature_talker.write(folder / "voxcpm2")
    return folder / "voxcpm2"
