"""A hub id or a local directory -> the directory of a published checkpoint, at one pinned revision.

Weights, tokenizer and processor come from the same directory, so that a revision pins all of them. HF_HUB_OFFLINE
and the other variables of huggingface_hub apply.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from models.errors import CheckpointError
from models.registry import family_of
from service.engine.config import LoadFormat

SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
WEIGHT_FILES = ("*.safetensors", "audiovae.pth")
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[A-Za-z0-9][\w.-]*)?")


@dataclass(frozen=True)
class Checkpoint:
    """source: what the operator named, without the revision. revision: the commit, None for a local directory."""

    source: str
    directory: Path
    revision: str | None = None


def locate(model: str, revision: str | None = None, load_format: LoadFormat = "published") -> Checkpoint:
    """The checkpoint that `model` names: a directory, HUB_ID or HUB_ID@REVISION. Downloads what is not cached.

    CheckpointError says what was looked for and where.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        return Checkpoint(model, path.resolve())
    source, _, pinned = model.partition("@")
    if not HUB_ID.fullmatch(source):
        raise CheckpointError(f"{model}: neither a directory nor a hub id (OWNER/NAME)")
    return _download(source, pinned or revision, load_format)


def _download(source: str, revision: str | None, load_format: LoadFormat) -> Checkpoint:
    import httpx
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    def fetch(patterns: Sequence[str], revision: str | None) -> Path:
        offline = constants.is_offline_mode()
        return Path(
            snapshot_download(source, revision=revision, allow_patterns=list(patterns), local_files_only=offline)
        )

    where = f"{source}@{revision}" if revision else source
    try:
        directory = fetch(SMALL_FILES, revision)
        # Before gigabytes are fetched: what is not hosted is refused by name. The weights are of the same commit.
        family_of(directory)
        if load_format == "published":
            fetch(WEIGHT_FILES, directory.name)
    except (LocalEntryNotFoundError, httpx.TransportError) as error:
        raise CheckpointError(f"{where}: not in the local cache, and the hub cannot be reached or is off") from error
    except HfHubHTTPError as error:
        raise CheckpointError(f"{where}: the hub does not give it out ({type(error).__name__})") from error
    return Checkpoint(source, directory, directory.name)
