"""The golden VoxCPM2 with a longer context, for tests that need many steps and no speech: it speaks noise."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "golden/voxcpm2"
POSITIONS = 1024


@cache
def talker() -> Path:
    """The directory of its checkpoint, which lives as long as this process."""
    folder = Path(tempfile.mkdtemp(prefix="reprise-miniature-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (copy := folder / SOURCE.name).mkdir()
    for file in SOURCE.iterdir():
        if file.name not in ("expected.safetensors", "config.json"):
            (copy / file.name).symlink_to(file)
    config = json.loads((SOURCE / "config.json").read_text())
    config["lm_config"]["max_position_embeddings"] = config["max_length"] = POSITIONS
    (copy / "config.json").write_text(json.dumps(config))
    return copy
