"""Transfers one file from the hub to the cache over plain HTTP; broken transfers resume where they ended.

huggingface_hub 2 restarts a file once its few retries are used up, so files are received here, with its session
(proxies, certificates), its headers (token) and its errors.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from huggingface_hub import constants, get_session, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

from service.hub.cache import RepositoryCache, in_bytes, locked
from service.hub.failures import HUB_ERRORS, BrokenTransfer, asked_delay, is_transient, short_reason
from service.hub.listing import RemoteFile

_BLOCK = 1 << 20

Report = Callable[[str], None]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Retry:
    """attempts: failures in a row without progress before giving up. It waits 1, 2, 4, ... s, or Retry-After, up to
    `longest`."""

    attempts: int = 6
    longest: float = 60.0

    def delay(self, failures: int, error: BaseException) -> float:
        return min(max(2.0 ** (failures - 1), asked_delay(error)), self.longest)


def attempt(action: Callable[[], Result], retry: Retry, report: Report) -> Result:
    """The result of a request to the hub, which is repeated after temporary errors."""
    failures = 0
    while True:
        try:
            return action()
        except HUB_ERRORS as error:
            failures += 1
            if not is_transient(error) or failures >= retry.attempts:
                raise
            seconds = retry.delay(failures, error)
            report(f"{short_reason(error)}; trying again in {seconds:.0f} s")
            time.sleep(seconds)


class Progress:
    """A line of `report` every `interval` seconds while bytes arrive. Any thread may call it."""

    def __init__(
        self, total: int, report: Report, *, interval: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._total, self._report, self._interval, self._clock = total, report, interval, clock
        self._done = self._told = 0
        self._time = clock()
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """count: bytes; negative if some must be sent again."""
        with self._lock:
            self._done += count
            now = self._clock()
            if now - self._time >= self._interval:
                rate = max(0, self._done - self._told) / (now - self._time)
                self._report(f"{in_bytes(self._done)} of {in_bytes(self._total)} ({in_bytes(rate)}/s)")
                self._time, self._told = now, self._done


class Transfer:
    """Receives files of one commit. `stop` ends all transfers at their next bytes."""

    def __init__(self, cache: RepositoryCache, commit: str, retry: Retry, progress: Progress, report: Report) -> None:
        self._cache, self._commit = cache, commit
        self._retry, self._progress, self._report = retry, progress, report
        self.stop = threading.Event()

    def fetch(self, file: RemoteFile) -> None:
        """Receives a file into the snapshot, unless the blob exists already. Raises HUB_ERRORS, BrokenTransfer or
        OSError."""
        blob, partial = self._cache.blob(file), self._cache.partial(file)
        if not blob.exists():
            waiting = f"{file.name}: another process is downloading it; waiting"
            with locked(partial, lambda: self._report(waiting)) as out:
                # Another process may have downloaded it while this one waited.
                if blob.exists():
                    partial.unlink()
                else:
                    self._receive_all(file, partial, out)
                    os.replace(partial, blob)
        self._cache.link(file, self._commit)

    def _receive_all(self, file: RemoteFile, partial: Path, out: BinaryIO) -> None:
        failures, furthest = 0, _size(out)
        while True:
            try:
                self._receive(file, out)
                self._verify(file, partial, out)
                return
            except (*HUB_ERRORS, BrokenTransfer) as error:
                arrived = _size(out)
                failures = 1 if arrived > furthest else failures + 1
                furthest = max(furthest, arrived)
                place = f"{file.name} at {in_bytes(arrived)} of {in_bytes(file.size)}: {short_reason(error)}"
                if not is_transient(error):
                    raise
                if failures >= self._retry.attempts:
                    # describe() words HTTP errors itself.
                    raise error if isinstance(error, HfHubHTTPError) else BrokenTransfer(place) from error
                seconds = self._retry.delay(failures, error)
                self._report(f"{place}; trying again in {seconds:.0f} s")
                if self.stop.wait(seconds):
                    raise

    def _receive(self, file: RemoteFile, out: BinaryIO) -> None:
        offset = _size(out)
        if offset == file.size:
            return
        if offset > file.size:
            offset = self._restart(out)
        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        if offset:
            headers["Range"] = f"bytes={offset}-"
        url = hf_hub_url(self._cache.source, file.name, revision=self._commit)
        with get_session().stream("GET", url, headers=headers, timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT) as response:
            hf_raise_for_status(response)
            if offset and not _continues(response, offset):
                self._restart(out)
            self._copy(response, file, out)

    def _copy(self, response: Any, file: RemoteFile, out: BinaryIO) -> None:
        try:
            for chunk in response.iter_bytes():
                if self.stop.is_set():
                    raise InterruptedError("another file of the download failed")
                out.write(chunk)
                self._progress.add(len(chunk))
        finally:
            out.flush()
        arrived = _size(out)
        if arrived != file.size:
            raise BrokenTransfer("it ended early")

    def _restart(self, out: BinaryIO) -> int:
        self._progress.add(-_size(out))
        out.truncate(0)
        return 0

    def _verify(self, file: RemoteFile, partial: Path, out: BinaryIO) -> None:
        """Checks the hash: parts may come from several attempts, proxies or processes."""
        with partial.open("rb") as received:
            found = _hash(file, received)
        if found != file.etag:
            self._restart(out)
            raise BrokenTransfer(f"its hash is {found}, the hub lists {file.etag}")


def _size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


def _hash(file: RemoteFile, received: BinaryIO) -> str:
    """Hash of what was received, as the hub lists it: SHA-256 of a large file, git's SHA-1 of a small one."""
    is_large = len(file.etag) == 64
    hasher = hashlib.sha256() if is_large else hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)
    while block := received.read(_BLOCK):
        hasher.update(block)
    return hasher.hexdigest()


def _continues(response: Any, offset: int) -> bool:
    """A server may ignore the header Range and send the whole file."""
    return response.status_code == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {offset}-")
