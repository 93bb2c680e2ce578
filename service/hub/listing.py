"""Lists a repository of the hub, chooses the files that a server needs, and refuses repositories that cannot be
served."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import HfHubHTTPError

from models.checkpoints.published import read_json
from models.interfaces.errors import CheckpointError

SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CODECS = ("audiovae.safetensors", "audiovae.pth")
"""The codec of a speech model; loading reads the first one that is there."""
OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack", "*.onnx")
_LISTED = 4
"""Names that an error has."""
COMMIT = re.compile(r"[0-9a-f]{40}")
_HASH = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_TIMEOUT = 20.0
"""Seconds of silence after which the hub counts as out of reach."""


@dataclass(frozen=True)
class RemoteFile:
    """size: bytes. etag: hexadecimal, the SHA-256 of a large file, git's SHA-1 of a small one."""

    name: str
    size: int
    etag: str


@dataclass(frozen=True)
class Listing:
    """names: all files of the repository. files: those at the top level for which the hub gives size and hash."""

    source: str
    commit: str
    names: tuple[str, ...]
    files: Mapping[str, RemoteFile]

    def select(self, names: Sequence[str]) -> list[RemoteFile]:
        absent = [name for name in names if name not in self.files]
        if absent:
            raise CheckpointError(f"{self.source}: the hub lists no file {absent[0]} with a size and a hash")
        return [self.files[name] for name in names]


def list_repository(source: str, revision: str | None) -> Listing:
    """One request to the hub; raises the errors of huggingface_hub."""
    try:
        info = HfApi(constants.ENDPOINT).model_info(source, revision=revision, files_metadata=True, timeout=_TIMEOUT)
    except HfHubHTTPError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{source}: unexpected answer from {constants.ENDPOINT} ({error!r})") from error
    commit = info.sha or ""
    # Commits and hashes become file names in the cache.
    if not COMMIT.fullmatch(commit):
        raise CheckpointError(f"{source}: the hub returned {commit!r}, no commit")
    files = {}
    for sibling in info.siblings or ():
        size, etag = (sibling.lfs.size, sibling.lfs.sha256) if sibling.lfs else (sibling.size, sibling.blob_id)
        if "/" not in sibling.rfilename and size is not None and _HASH.fullmatch(etag or ""):
            files[sibling.rfilename] = RemoteFile(sibling.rfilename, size, str(etag))
    return Listing(source, commit, tuple(sibling.rfilename for sibling in info.siblings or ()), files)


def refuse_unreadable(listing: Listing, *, weights: bool) -> None:
    """Raises CheckpointError for a repository that is not a checkpoint in the published layout, judging by the names of
    its files. weights: whether they are needed.
    """
    source, names = listing.source, listing.names
    if "adapter_config.json" in names:
        raise CheckpointError(f"{source}: adapter_config.json: adapter checkpoints are not hosted")
    if "config.json" not in names:
        gguf = [name for name in names if name.endswith(".gguf")]
        if gguf:
            raise CheckpointError(
                f"{source}: a GGUF repository ({listed(gguf)}); use one with config.json and safetensors "
                "weights, such as the original it was converted from"
            )
        raise CheckpointError(
            f"{source}: no config.json, only {listed(names)}; needed are config.json, tokenizer files and safetensors "
            "weights at the top of the repository"
        )
    if weights and not any(map(_is_weights, names)):
        others = [name for name in names if any(fnmatch(name, pattern) for pattern in OTHER_WEIGHTS)]
        raise CheckpointError(
            f"{source}: no safetensors weights, only {listed(others)}; other formats are not read: name a revision or "
            "a repository that has them as safetensors"
        )


def small_files(listing: Listing) -> list[str]:
    """Files of configuration, tokenizer and processor, which can be read before the weights have arrived."""
    return [name for name in listing.names if "/" not in name and any(fnmatch(name, p) for p in SMALL_FILES)]


def weight_files(names: Sequence[str], directory: Path) -> list[str]:
    """Files of weights that loading reads, of the `names` in a repository or directory. directory: has the small files.

    The same choice as models.checkpoints.weight_files.shard_paths, so that a second copy in another format is not
    fetched.
    """
    if SINGLE in names:
        shards = [SINGLE]
    elif INDEX in names:
        weight_map = read_json(directory, INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{INDEX}: weight_map must give a file name for every tensor")
        shards = sorted({str(name) for name in weight_map.values()})
    else:
        shards = sorted(filter(_is_weights, names))
    codec = next((name for name in CODECS if name in names), None)
    return [*shards, codec] if codec else shards


def _is_weights(name: str) -> bool:
    return "/" not in name and fnmatch(name, "*.safetensors") and name not in CODECS


def is_complete(directory: Path, *, weights: bool) -> bool:
    """Whether a snapshot in the cache has everything that loading reads, judging by its own files."""
    names = [path.name for path in directory.iterdir() if path.exists()]
    needed = weight_files(names, directory) if weights else []
    has_weights = any(map(_is_weights, needed))
    return "config.json" in names and set(needed) <= set(names) and has_weights == weights


def listed(names: Sequence[str]) -> str:
    """The first of these names, and how many more there are, for an error."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return (", ".join(names[:_LISTED]) or "no files") + more
