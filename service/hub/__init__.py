"""A hub id, a directory or the name of an embedded model -> the directory of a checkpoint, at one pinned revision.

Weights, tokenizer and processor come from the same directory, so that a revision pins all of them. HF_TOKEN, HF_HOME,
HF_ENDPOINT, HF_HUB_OFFLINE and the other variables of huggingface_hub apply.
"""

from __future__ import annotations

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


def embedded() -> dict[str, Path]:
    """The directories of the models inside the package, by the name under which each is served."""
    return {f"{OWNER}/{path.parent.name}": path.parent for path in sorted(EMBEDDED.glob("*/config.json"))}


def locate(
    model: str, load_format: LoadFormat = "published", report: Callable[[str], None] = lambda line: None
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
    if (directory := embedded().get(model)) is not None:
        return Checkpoint(model, directory)
    source, _, pinned = model.partition("@")
    if not HUB_ID.fullmatch(source):
        several = "; several models are a list" if len(model.split()) > 1 else ""
        raise CheckpointError(f"{model or repr(model)}: neither a directory nor a hub id (OWNER/NAME){several}")
    # huggingface_hub takes a while to import, and a local directory does without it.
    from service.hub.download import obtain

    try:
        directory = obtain(source, pinned or None, load_format, report)
    except CheckpointError as error:
        if source.startswith(f"{OWNER}/"):
            raise CheckpointError(f"{error}; the embedded models are {' and '.join(embedded())}") from error
        if path.parent != Path() and path.parent.is_dir():  # it may have been meant as a path
            raise CheckpointError(f"{error}; there is no directory {path}") from error
        raise
    return Checkpoint(source, directory, directory.name)


def _models_in(path: Path) -> list[str]:
    """Directories of checkpoints inside, also where the hub's cache has them."""
    found = sorted(config for pattern in ("*", "snapshots/*") for config in path.glob(f"{pattern}/config.json"))
    return [str(config.parent) for config in found]
