"""Writes requirements*.lock: the exact versions of the image, of `make serve`, `make test` and `make test-all`.

    make lock                     # what pyproject.toml asks for anew; versions stay where they can
    make lock ARGS=--upgrade      # the newest of everything but torch

Valid for Python 3.11 to 3.14 on Linux, macOS and Windows. Each entry has the hashes of its files but for torch, Triton
and CUDA's libraries, whose files differ between the indices that have them: these are pinned by version, in a file of
their own. The resolver reads metadata alone; pip installs.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TORCH = "torch==2.13.0"
"""What results were measured with. Newer ones within pyproject.toml's range work, too."""
LEAST_PYTHON = "3.11"
UNHASHED = re.compile(r"(torch|triton|nvidia-[a-z0-9-]+|cuda-(bindings|pathfinder|toolkit))")
BUILD = ("hatchling", "editables", "uv")
"""What turns the source into a package; `editables` where the checkout itself is installed, uv for torch in an image
for the CPU."""
LOCKS: dict[str, tuple[str, ...]] = {
    "requirements-test-all.lock": ("test-all",),
    "requirements-test.lock": ("test",),
    "requirements.lock": ("tracing",),
}
"""Files and their extras. The first holds everything; the others take its versions."""
TORCH_LOCK = "requirements-torch.lock"
BUILD_LOCK = "requirements-build.lock"


@dataclass(frozen=True)
class Entry:
    """One package of a lock. text: its lines; pin: the first one without the hashes, `name==version [; marker]`."""

    name: str
    pin: str
    text: str


def entries(lock: str) -> list[Entry]:
    """Packages of a requirements file."""
    found = []
    for text in re.split(r"^(?=\w)", re.sub(r"^#.*\n", "", lock, flags=re.MULTILINE), flags=re.MULTILINE):
        if text.strip():
            pin = text.splitlines()[0].removesuffix("\\").strip()
            found.append(Entry(pin.partition("==")[0], pin, text.rstrip() + "\n"))
    return found


def resolve(uv: str, wanted: list[str | Path], known: list[Entry], *, upgrade: bool = False) -> list[Entry]:
    """What the files and extras in `wanted` need, with versions of `known` where they fit."""
    with tempfile.TemporaryDirectory() as folder:
        out, constraints = Path(folder, "out.lock"), Path(folder, "constraints.txt")
        constraints.write_text(TORCH + "\n")
        out.write_text("" if upgrade else "".join(entry.text for entry in known))  # uv keeps what it finds there
        subprocess.run(
            [
                *(uv, "pip", "compile", *wanted, "-o", out, "-c", constraints, "--universal", "--generate-hashes"),
                *("--python-version", LEAST_PYTHON, "--fork-strategy", "fewest", "--no-annotate", "--no-header"),
                "--quiet",
            ],
            check=True,
            cwd=ROOT,
        )
        return entries(out.read_text())


def resolve_build(uv: str, known: list[Entry]) -> list[Entry]:
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder, "build.in")
        wanted.write_text("\n".join(BUILD))
        return resolve(uv, [wanted], known)


def unhashed(found: list[Entry]) -> list[Entry]:
    return [Entry(entry.name, entry.pin, entry.pin + "\n") for entry in found if UNHASHED.fullmatch(entry.name)]


def hashed(found: list[Entry]) -> list[Entry]:
    return [entry for entry in found if not UNHASHED.fullmatch(entry.name)]


def read(name: str) -> list[Entry]:
    path = ROOT / name
    return entries(path.read_text()) if path.exists() else []


def write(name: str, comment: str, found: list[Entry]) -> None:
    (ROOT / name).write_text(
        f"# {comment} Written by `make lock` from pyproject.toml.\n" + "".join(entry.text for entry in found)
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--uv", default="uv", help="the resolver")
    parser.add_argument("--upgrade", action="store_true", help="newest versions")
    given = parser.parse_args(arguments)
    known = [*read(next(iter(LOCKS))), *read(TORCH_LOCK)]
    upgrade = given.upgrade
    for name, extras in LOCKS.items():
        wanted: list[str | Path] = ["pyproject.toml", *(f"--extra={extra}" for extra in extras)]
        found = resolve(given.uv, wanted, known, upgrade=upgrade)
        what = f"The server's packages{' and those of the extra ' + extras[0] if extras else ''}, torch apart."
        write(name, what, hashed(found))
        if upgrade or name == next(iter(LOCKS)):
            known, upgrade = found, False
            write(TORCH_LOCK, "Constraints of `pip install torch`: it, Triton and CUDA's libraries.", unhashed(found))
    write(BUILD_LOCK, "What builds the package from its source.", resolve_build(given.uv, known))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
