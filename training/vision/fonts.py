"""Fonts of printed text: files of Debian packages, found by name in one directory, which REPRISE_WORLD_FONTS names.

python -m training.vision.fonts build/fonts   # fetches the packages and takes the files out; installs nothing
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from functools import lru_cache
from pathlib import Path

from PIL import ImageFont

from training.vision.words import listed

_VARIABLE = "REPRISE_WORLD_FONTS"
SEEN_FONTS = listed("seen fonts")
UNSEEN_FONTS = listed("unseen fonts")
"""Families that training never draws."""
_SUFFIXES = (".ttf", ".otf")


@lru_cache(maxsize=4096)
def font(name: str, size: int) -> ImageFont.FreeTypeFont:
    directory = Path(os.environ.get(_VARIABLE, "build/fonts"))
    for path in (directory / f"{name}{suffix}" for suffix in _SUFFIXES):
        if path.exists():
            return ImageFont.truetype(path, size, layout_engine=ImageFont.Layout.BASIC)
    raise FileNotFoundError(f"{directory}: no font {name}; `make fonts` fetches them, or set {_VARIABLE}")


def fetch(directory: Path) -> None:
    """Downloads the packages by apt-get, which checks their signatures, and copies the files into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        subprocess.run(["apt-get", "download", "-q", *listed("font packages")], cwd=scratch, check=True)
        for package in sorted(Path(scratch).glob("*.deb")):
            subprocess.run(["dpkg-deb", "-x", str(package), str(Path(scratch) / "files")], check=True)
        found = {path.name: path for path in sorted(Path(scratch).rglob("*.[to]tf"))}
        for name in (*SEEN_FONTS, *UNSEEN_FONTS):
            files = [found[name + suffix] for suffix in _SUFFIXES if name + suffix in found]
            if not files:
                raise FileNotFoundError(f"none of the packages has the font {name}")
            shutil.copy(files[0], directory)


if __name__ == "__main__":
    fetch(Path(sys.argv[1]))
