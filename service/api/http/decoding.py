"""Memory of media until they are decoded: charged to their request before they are fetched, and by the size in the
header before any pixel is decoded."""

from __future__ import annotations

from functools import partial
from types import TracebackType

from models.interfaces.errors import InputError
from service.api.http.admission import Ticket
from service.api.http.errors import ApiError
from service.media.fetch import FetchesBusy
from service.media.loader import NoRoom


class Decoding:
    """The bytes of one picture, video or audio, from the first that is fetched to what is kept of it. take() is called
    by the thread that decodes it; all else belongs to the event loop, which may leave the block (a client that has
    gone) while the thread is still at work. FetchesBusy leaves the block as ApiError 503.
    """

    def __init__(self, ticket: Ticket) -> None:
        self.refused = False
        """Whether there was no room for it."""
        self._ticket = ticket
        self._lock = ticket.admission.lock
        self._fetched = 0
        self._size = 0
        """Bytes charged for decoding it."""
        self._taken = 0
        """Those of them that take() has asked for."""
        self._open = True

    def __enter__(self) -> Decoding:
        self._ticket.load(1)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Gives back what is not kept."""
        with self._lock:
            self._open = False
            self._end(0)
            self._ticket.load(-1)
        if isinstance(error, FetchesBusy):
            raise self._ticket.refusal("fetches", str(error)) from error

    async def reserve(self, size: int) -> None:
        """Charges the most bytes that a fetch may bring, when it is its turn. ApiError 503 if that does not come."""
        await self._wait(size)
        self._fetched = size

    def fetched(self, size: int) -> None:
        """Charges what was fetched in place of what was reserved for it, until it is decoded."""
        self._ticket.adjust(size - self._fetched)
        self._fetched = size

    def take(self, size: int) -> None:
        """Charges `size` bytes. NoRoom if they have to wait for their turn. InputError if nobody waits for the picture
        any more: it is not decoded then."""
        with self._lock:
            if not self._open:
                raise InputError("", "the request has ended")
            missing = self._taken + size - self._size
            if not self._size and not self._ticket.take_decoding(size):
                raise NoRoom(partial(self._turn, size))
            if self._size and missing > 0:  # of a later frame, beside those that are decoded already
                self._ticket.adjust(missing)
                self._ticket.decoding += missing
            self._size += max(0, missing)
            self._taken += size

    def keep(self, size: int) -> None:
        """Charge `size` decoded bytes in place of the bytes that were taken and fetched."""
        with self._lock:
            self._end(size)

    async def _turn(self, size: int) -> None:
        await self._wait(size, decoding=True)
        self._size = size

    async def _wait(self, size: int, *, decoding: bool = False) -> None:
        try:
            await self._ticket.wait(size, decoding=decoding)
        except ApiError:
            self.refused = True
            raise

    def _end(self, kept: int) -> None:
        self._ticket.decoding -= self._size
        if kept != self._fetched + self._size:
            self._ticket.adjust(kept - self._fetched - self._size)
        self._fetched = self._size = 0
