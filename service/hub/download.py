"""Downloads a checkpoint from the hub: first the list of files, then the small files, at last the weights."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path

from huggingface_hub import constants
from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled, RevisionNotFoundError

from models.checkpoints.registry import family_of
from models.interfaces.errors import CheckpointError
from service.hub.cache import RepositoryCache, in_bytes
from service.hub.failures import HUB_ERRORS, BrokenTransfer, describe
from service.hub.listing import (
    COMMIT,
    Listing,
    RemoteFile,
    is_complete,
    list_repository,
    refuse_unreadable,
    small_files,
    weight_files,
)
from service.hub.transfer import Progress, Report, Retry, Transfer, attempt
from service.link.config import LoadFormat

_PARALLEL_FILES = 4
_LIST_ATTEMPTS = 3
DEFAULT_RETRY = Retry()


def obtain(
    source: str, revision: str | None, load_format: LoadFormat, report: Report, retry: Retry = DEFAULT_RETRY
) -> Path:
    """The cached snapshot of `source`, downloaded if incomplete. CheckpointError with a one-line message."""
    cache = RepositoryCache(source)

    def told(line: str) -> None:
        report(f"{source}: {line}")

    try:
        return _Download(cache, revision, load_format == "published", told, retry).run()
    except HFValidationError as error:
        raise CheckpointError(f"{source}: no hub id: {error}") from error
    except (*HUB_ERRORS, BrokenTransfer, OSError) as error:
        raise CheckpointError(describe(error, source, revision, cache.home)) from error


class _Download:
    def __init__(
        self, cache: RepositoryCache, revision: str | None, weights: bool, report: Report, retry: Retry
    ) -> None:
        self._cache, self._revision, self._weights = cache, revision, weights
        self._report, self._retry = report, retry

    def run(self) -> Path:
        cached = self._cached()
        if cached is not None and COMMIT.fullmatch(self._revision or ""):
            return cached
        if constants.HF_HUB_OFFLINE:
            if cached is None:
                raise OfflineModeIsEnabled
            return cached
        listing = self._list(cached)
        if listing is None:
            assert cached is not None
            return cached
        refuse_unreadable(listing, weights=self._weights)
        directory = self._cache.snapshot(listing.commit)
        self._fetch(listing.select(small_files(listing)), listing.commit)
        # Refuse an unsupported architecture before downloading gigabytes.
        family_of(directory)
        if self._weights:
            self._fetch(listing.select(weight_files(listing.names, directory)), listing.commit)
        self._cache.remember(self._revision, listing.commit)
        return directory

    def _cached(self) -> Path | None:
        snapshot = self._cache.find(self._revision)
        return snapshot if snapshot is not None and is_complete(snapshot, weights=self._weights) else None

    def _list(self, cached: Path | None) -> Listing | None:
        """None if the hub cannot be reached but the cache has an earlier download."""
        attempts = Retry(_LIST_ATTEMPTS if cached is None else 1, self._retry.longest)
        try:
            return attempt(lambda: list_repository(self._cache.source, self._revision), attempts, self._report)
        except RevisionNotFoundError:
            raise
        except HUB_ERRORS as error:
            if cached is None:
                raise
            line = describe(error, self._cache.source, self._revision, self._cache.home)
            self._report(f"the copy in the cache is used, commit {cached.name[:12]} ({line})")
            return None

    def _fetch(self, files: Sequence[RemoteFile], commit: str) -> None:
        files = self._cache.absent(files, commit)
        self._cache.require_space(files)
        size = sum(map(self._cache.remaining, files))
        if size:
            many = "1 file" if len(files) == 1 else f"{len(files)} files"
            self._report(f"downloading {in_bytes(size)} in {many} to {self._cache.home}")
        transfer = Transfer(self._cache, commit, self._retry, Progress(size, self._report), self._report)
        with ThreadPoolExecutor(_PARALLEL_FILES, "download") as pool:
            try:
                pending = [pool.submit(transfer.fetch, file) for file in files]
                done, _ = wait(pending, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
            finally:
                # An error, or the user's Ctrl-C, ends the other files, too; their received parts stay.
                transfer.stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
