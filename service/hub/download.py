"""Downloads a checkpoint from the hub into the cache of huggingface_hub: first the list of files, which refuses what
cannot be served, then the small files, at last the weights. Failures are described in one line with a remedy.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, constants, get_token, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import repo_folder_name

from models.checkpoints.published import read_json
from models.checkpoints.registry import family_of
from models.interfaces.errors import CheckpointError
from service.link.config import LoadFormat
from service.system.access import no_space

Report = Callable[[str], None]

SMALL_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
CODECS = ("audiovae.safetensors", "audiovae.pth")
"""The codec of a speech model; loading reads the first one that is there."""
OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack", "*.onnx")
COMMIT = re.compile(r"[0-9a-f]{40}")
_LISTED = 4
"""Names that an error has."""
_PARALLEL_FILES = 4
_TIMEOUT = 20.0
"""Seconds of silence after which the hub counts as out of reach."""

# The client library below is httpx in huggingface_hub 1 and httpx2 in 2; HfHubHTTPError derives from its HTTPError.
TransportError: type[Exception] = next(kind for kind in HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError")
HUB_ERRORS = (HfHubHTTPError, TransportError, OfflineModeIsEnabled)
"""Errors of a hub request. Disk errors are OSError, but so is HfHubHTTPError: test for it first."""


def obtain(source: str, revision: str | None, load_format: LoadFormat, report: Report) -> Path:
    """The cached snapshot of `source`, downloaded if incomplete. CheckpointError with a one-line message."""
    cache = Path(os.path.expanduser(constants.HF_HUB_CACHE))
    if cache.parts[0].startswith("~"):
        raise CheckpointError(f"{source}: no home is known for the cache {cache}; set HOME or HF_HOME")
    try:
        return _obtain(cache, source, revision, load_format == "published", report)
    except HFValidationError as error:
        raise CheckpointError(f"{source}: no hub id: {error}") from error
    except (*HUB_ERRORS, OSError) as error:
        # Of a file that could neither be looked up nor found in the cache, the cause says why.
        cause = error.__cause__ if isinstance(error, LocalEntryNotFoundError) and error.__cause__ else error
        raise CheckpointError(describe(cause, source, revision, cache)) from error


def _obtain(cache: Path, source: str, revision: str | None, weights: bool, report: Report) -> Path:
    config = try_to_load_from_cache(source, "config.json", cache_dir=cache, revision=revision)
    cached = Path(config).parent if isinstance(config, str) else None
    if cached is not None and not is_complete(cached, weights=weights):
        cached = None
    if cached is not None and (constants.HF_HUB_OFFLINE or COMMIT.fullmatch(revision or "")):
        return cached
    if constants.HF_HUB_OFFLINE:
        raise OfflineModeIsEnabled
    try:
        commit, sizes = list_repository(source, revision)
    except RevisionNotFoundError:
        raise
    except HUB_ERRORS as error:
        if cached is None:
            raise
        line = describe(error, source, revision, cache)
        report(f"{source}: the copy in the cache is used, commit {cached.name[:12]} ({line})")
        return cached
    refuse_unreadable(source, list(sizes), weights=weights)
    folder = cache / repo_folder_name(repo_id=source, repo_type="model")
    directory = folder / "snapshots" / commit
    at: Any = {"revision": commit, "cache_dir": cache, "endpoint": constants.ENDPOINT}

    def fetch(names: Sequence[str]) -> None:
        absent = [name for name in names if not (directory / name).exists()]
        needed, free = sum(sizes[name] for name in absent), free_bytes(cache)
        if needed > free:
            raise CheckpointError(
                f"{source}: needs {in_bytes(needed)}, {in_bytes(free)} free in {cache}: free some space, or set "
                "HF_HOME to a directory on another disk"
            )
        if absent:
            many = "1 file" if len(absent) == 1 else f"{len(absent)} files"
            report(f"{source}: downloading {in_bytes(needed)} in {many} to {cache}")
        with ThreadPoolExecutor(_PARALLEL_FILES, "download") as pool:
            list(pool.map(lambda name: hf_hub_download(source, name, **at), absent))

    fetch([name for name in sizes if "/" not in name and any(fnmatch(name, small) for small in SMALL_FILES)])
    family_of(directory)  # refuses an unsupported architecture before gigabytes are downloaded
    if weights:
        fetch(weight_files(list(sizes), directory))
    if not COMMIT.fullmatch(revision or ""):  # only now: offline, the former copy is used until this one is whole
        ref = folder / "refs" / (revision or constants.DEFAULT_REVISION)
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(commit)
    return directory


def list_repository(source: str, revision: str | None) -> tuple[str, dict[str, int]]:
    """The commit of a revision, and the bytes of each file. Raises the errors of huggingface_hub."""
    try:
        info = HfApi(constants.ENDPOINT).model_info(source, revision=revision, files_metadata=True, timeout=_TIMEOUT)
    except HfHubHTTPError:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{source}: unexpected answer from {constants.ENDPOINT} ({error!r})") from error
    if not COMMIT.fullmatch(info.sha or ""):  # which becomes the name of a folder
        raise CheckpointError(f"{source}: the hub returned {info.sha!r}, no commit")
    return str(info.sha), {file.rfilename: file.size or 0 for file in info.siblings or ()}


def refuse_unreadable(source: str, names: Sequence[str], *, weights: bool) -> None:
    """Raise CheckpointError for a repository that is no checkpoint in the published layout, by the names of its files.
    weights: whether they are needed."""
    if "adapter_config.json" in names:
        raise CheckpointError(f"{source}: adapter_config.json: adapter checkpoints are not hosted")
    if "config.json" not in names:
        if gguf := [name for name in names if name.endswith(".gguf")]:
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


def weight_files(names: Sequence[str], directory: Path) -> list[str]:
    """Files of weights that loading reads, of the `names` in a repository or directory; the same choice as
    models.checkpoints.weight_files.shard_paths. directory: has the small files."""
    if SINGLE in names:
        shards = [SINGLE]
    elif INDEX in names:
        weight_map = read_json(directory, INDEX).get("weight_map")
        if not isinstance(weight_map, Mapping):
            raise CheckpointError(f"{INDEX}: weight_map must give a file name for every tensor")
        shards = sorted({str(name) for name in weight_map.values()})
        if absent := [name for name in shards if name not in names]:
            raise CheckpointError(f"{INDEX}: names {absent[0]}, which is not there")
    else:
        shards = sorted(filter(_is_weights, names))
    codec = next((name for name in CODECS if name in names), None)
    return [*shards, codec] if codec else shards


def _is_weights(name: str) -> bool:
    return "/" not in name and fnmatch(name, "*.safetensors") and name not in CODECS


def is_complete(directory: Path, *, weights: bool) -> bool:
    """Whether a snapshot in the cache has everything that loading reads, judging by its own files."""
    names = [path.name for path in directory.iterdir() if path.exists()]
    try:
        found = weight_files(names, directory) if weights else []
    except CheckpointError:
        return False
    return "config.json" in names and any(map(_is_weights, found)) == weights


def listed(names: Sequence[str]) -> str:
    """The first of these names, and how many more there are, for an error."""
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return (", ".join(names[:_LISTED]) or "no files") + more


def free_bytes(directory: Path) -> int:
    """Free bytes of the disk where `directory` is, or will be."""
    return shutil.disk_usage(next(path for path in (directory, *directory.parents) if path.exists())).free


def in_bytes(count: float) -> str:
    """4_400_000_000 -> "4.4 GB"."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count:.0f} bytes"


def describe(error: BaseException, source: str, revision: str | None, cache: Path) -> str:
    """One line: the request, the result, and what to do."""
    where = f"{source}@{revision}" if revision else source
    if isinstance(error, HfHubHTTPError):
        return f"{where}: {_refusal(error, source, revision)}"
    if isinstance(error, OfflineModeIsEnabled):
        return f"{where}: missing or incomplete in the cache {cache}, and HF_HUB_OFFLINE is set"
    if isinstance(error, TransportError):
        return f"{where}: {constants.ENDPOINT} cannot be reached ({_short(error)}), and the cache {cache} has no copy"
    if isinstance(error, OSError) and no_space(error):
        return f"{where}: no space left in {cache}: free some, or set HF_HOME to a directory on another disk"
    if isinstance(error, OSError) and error.errno is None:  # of huggingface_hub: a file that is not the listed one
        return f"{where}: the download failed ({_short(error)}): start again"
    reason = error.strerror if isinstance(error, OSError) else None
    return f"{where}: cannot use the cache {cache} ({reason or error}): set HF_HOME to a directory that can be written"


def _refusal(error: HfHubHTTPError, source: str, revision: str | None) -> str:
    page = f"{constants.ENDPOINT}/{source}"
    status = error.response.status_code
    if isinstance(error, GatedRepoError):
        account = "the account of HF_TOKEN has no access" if get_token() else "HF_TOKEN is not set"
        return (
            f"a gated repository, and {account}: accept its licence at {page} and set HF_TOKEN to a token of that "
            f"account ({status})"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"{page} has no revision {revision or constants.DEFAULT_REVISION!r}"
    if isinstance(error, RepositoryNotFoundError):
        return f"not found at {page}, or private: check the name; for a private one set HF_TOKEN ({status})"
    if status == 401:
        return f"{constants.ENDPOINT} does not accept HF_TOKEN (401): it is wrong or has expired"
    if status == 403:
        return f"{constants.ENDPOINT} forbids it (403): HF_TOKEN must be of an account that may read {page}"
    if status == 429:
        limit = f"{constants.ENDPOINT} limits the rate of requests (429)"
        return f"{limit}: wait a while, or set HF_TOKEN, whose limit is higher"
    if status >= 500:
        return f"{constants.ENDPOINT} fails ({status} {error.response.reason_phrase}): try again later"
    return f"{constants.ENDPOINT} answers ({status} {error.response.reason_phrase})"


def _short(error: BaseException) -> str:
    return (str(error).splitlines() or [""])[0] or type(error).__name__
