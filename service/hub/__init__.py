"""A hub id, a directory or the name of an embedded model -> the directory of a checkpoint, at one pinned revision.

Weights, tokenizer and processor come from the same directory, so that a revision pins all of them. HF_TOKEN, HF_HOME,
HF_ENDPOINT, HF_HUB_OFFLINE and the other variables of huggingface_hub apply.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import models
from models.interfaces.errors import CheckpointError
from service.link.config import LoadFormat

EMBEDDED = Path(models.__file__).parent / "embedded"
OWNER = "reprise"
"""What stands before the names of the embedded models."""
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class Checkpoint:
    """source: what the operator named, without the revision. revision: the commit, None for a local directory."""

    source: str
    directory: Path
    revision: str | None = None


def embedded(model: str) -> Path | None:
    """The directory of a model inside the package, by the name under which it is served."""
    return _embedded().get(model)


def _embedded() -> dict[str, Path]:
    """The directories of the models inside the package by name."""
    return {f"{OWNER}/{path.parent.name}": path.parent for path in sorted(EMBEDDED.glob("*/config.json"))}


def locate(
    model: str,
    revision: str | None = None,
    load_format: LoadFormat = "published",
    report: Callable[[str], None] = lambda line: None,
) -> Checkpoint:
    """The checkpoint that `model` names: a directory, a name of an embedded model, HUB_ID or HUB_ID@REVISION. Downloads
    what is not cached.

    report: called with a line now and then during a download. CheckpointError says in one line what is wrong, and what
    to do about it.
    """
    path = Path(os.path.expanduser(model))
    if model and path.is_dir():
        if not (path / "config.json").exists() and (inside := _models_in(path)):
            raise CheckpointError(f"{model}: no config.json; there are models in it: {', '.join(inside[:4])}")
        return Checkpoint(model, path.resolve())
    if model and path.is_file():
        raise CheckpointError(f"{model}: a file, not a directory: name the directory with config.json and the weights")
    if (directory := embedded(model)) is not None:
        return Checkpoint(model, directory)
    source, _, pinned = model.partition("@")
    if not HUB_ID.fullmatch(source):
        several = "; several models are a list" if len(model.split()) > 1 else ""
        near = f"; {hint}" if (hint := _near(path)) else ""
        raise CheckpointError(f"{model or repr(model)}: neither a directory nor a hub id (OWNER/NAME){several}{near}")
    # huggingface_hub takes a while to import, and a local directory does without it.
    from service.hub.download import obtain

    try:
        directory = obtain(source, pinned or revision, load_format, report)
    except CheckpointError as error:
        if source.startswith(f"{OWNER}/"):
            raise CheckpointError(f"{error}; the embedded models are {' and '.join(_embedded())}") from error
        if hint := _near(path):  # it may have been meant as a path
            raise CheckpointError(f"{error}; {hint}") from error
        raise
    return Checkpoint(source, directory, directory.name)


def _near(path: Path) -> str:
    """The first directory of a path that is not there, and what may have been meant. Empty if nothing says that it is
    a path: not even its first part is there, or close to one that is."""
    there = near = Path(path.anchor)
    missing = None
    for part in path.parts[bool(path.anchor) :]:
        if missing is None and (there / part).is_dir():
            there = near = there / part
            continue
        missing = missing or there / part
        close = difflib.get_close_matches(part, _directories(near), 1)
        if not close:
            break
        near /= close[0]
    meant = f" (did you mean {near}?)" if near != there else ""
    return f"there is no directory {missing}{meant}" if missing is not None and near.parts else ""


def _models_in(path: Path) -> list[str]:
    """Directories of checkpoints inside, also where the hub's cache has them."""
    found = sorted(config for pattern in ("*", "snapshots/*") for config in path.glob(f"{pattern}/config.json"))
    return [str(config.parent) for config in found]


def _directories(path: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in path.iterdir() if entry.is_dir())
    except OSError:
        return []
