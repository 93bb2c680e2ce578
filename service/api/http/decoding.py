"""Memory of media until they are decoded: charged to their request as they arrive, and by the size in the header before
any pixel is decoded."""

from __future__ import annotations

import time
from types import TracebackType

from models.errors import InputError
from service.api.http.admission import Ticket
from service.api.http.errors import ApiError
from service.media.fetch import FetchesBusy

PATIENCE = 5.0
"""Seconds that a picture or video waits for others that are being decoded to give back their bytes."""
LOOK = 0.1
"""Seconds between two looks at what other processes of the server hold, which do not tell when that changes."""


class Decoding:
    """The bytes of one picture, video or audio, from the first that is fetched to what is kept of it. take() is called
    by the thread that decodes it; all else belongs to the event loop, which may leave the block (a client that has
    gone) while the thread is still at work. A refusal of take() leaves the block as the ApiError 503 that it is, and so
    does FetchesBusy.
    """

    def __init__(self, ticket: Ticket) -> None:
        self._refusal: ApiError | None = None
        self._ticket = ticket
        self._changed = ticket.admission.changed
        self._fetched = 0
        self._size = 0
        self._open = True

    def __enter__(self) -> Decoding:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Gives back what is not kept."""
        with self._changed:
            self._open = False
            self._end(0)
            self._changed.notify_all()
        if self._refusal is not None and isinstance(error, InputError):
            raise self._refusal from None
        if isinstance(error, FetchesBusy):
            raise self._ticket.refusal("fetches", str(error)) from error

    @property
    def refused(self) -> bool:
        """Whether there was no room for it."""
        return self._refusal is not None

    def fetched(self, size: int) -> None:
        """Charges encoded bytes that came from elsewhere than the request's body, until it is decoded. ApiError 503
        if there is no room for them: the event loop cannot wait here."""
        try:
            self._ticket.grow(size=size)
        except ApiError as error:
            self._refusal = error
            raise
        self._fetched += size

    def take(self, size: int) -> None:
        """Charges `size` bytes. Where there is no room for them, waits while other media are being decoded. InputError
        if there still is none, or if nobody waits for the picture any more: it is not decoded then."""
        admission, until = self._ticket.admission, time.monotonic() + PATIENCE
        with self._changed:
            while self._open and admission.decoding and not self._ticket.fits(size):
                if (left := until - time.monotonic()) <= 0:
                    break
                self._changed.wait(min(left, LOOK))
            if not self._open:
                raise InputError("", "the request has ended")
            try:
                self._ticket.grow(size=size)
            except ApiError as error:
                self._refusal = error
                raise InputError("", str(error)) from error
            if not self._size:
                admission.decoding += 1
            self._size += size

    def keep(self, size: int) -> None:
        """Charges `size` bytes in place of those that were taken and fetched: it is decoded. ApiError 503 without room
        for more."""
        with self._changed:
            held = self._fetched + self._size
            if size > held:
                self._ticket.grow(size=size - held)
            self._end(min(size, held))

    def _end(self, kept: int) -> None:
        if self._size:
            self._ticket.admission.decoding -= 1
        if held := self._fetched + self._size:
            self._ticket.adjust(kept - held)
        self._fetched = self._size = 0
