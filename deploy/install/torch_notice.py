"""Says which build of torch pip is about to take and what it weighs, before the download begins. Silent where it is
installed.

The default package index has builds for the CPU for macOS and Windows, and for Linux those with CUDA alone. Where there
is no GPU, uv is asked for a build for the CPU first; TORCH_INDEX names another index.
"""

from __future__ import annotations

import argparse
import importlib.util
import platform
import re
import shutil
import sys
from pathlib import Path

TORCH_LOCK = Path(__file__).resolve().parents[2] / "requirements-torch.lock"
WITH_CUDA = "about 2.5 GB to download and 6 GB on disk"
FOR_CPU = "about 0.2 GB to download and 1 GB on disk"


def pinned(lock: str) -> str:
    """The version of torch in a lock."""
    found = re.search(r"^torch==(\S+)", lock, re.MULTILINE)
    assert found, "the lock names no torch"
    return found[1]


def notice(version: str, system: str, index: str, device: str) -> str:
    """system: platform.system(). index: TORCH_INDEX. device: "cuda" or "cpu", what torch is wanted for."""
    if index:
        return f"torch {version}, the build that TORCH_INDEX has: with CUDA {WITH_CUDA}, for the CPU {FOR_CPU}."
    if system != "Linux":
        return f"torch {version} for the CPU: {FOR_CPU}."
    line = f"torch {version} with CUDA: {WITH_CUDA}."
    if device == "cuda":
        return line
    return (
        f"{line} No GPU is to be used, but the index with builds for the CPU could not be reached: "
        f"TORCH_INDEX=URL of one that can takes {FOR_CPU} instead."
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--index", default="", help="TORCH_INDEX")
    parser.add_argument("--device", choices=("cuda", "cpu"), help="what torch is for; left out: what is here")
    given = parser.parse_args(arguments)
    if importlib.util.find_spec("torch"):
        return 0
    device = given.device or ("cuda" if shutil.which("nvidia-smi") else "cpu")
    print(notice(pinned(TORCH_LOCK.read_text()), platform.system(), given.index, device), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
