"""Grammars of requests: made, bounded, and tried in confined processes before the engine sees them.

Clients take turns at both, and none holds all processes: the grammars of one client delay nobody else's.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import TypeVar

import msgspec

from service.api.http.errors import ApiError, bad_request
from service.api.structured.grammar import check_size
from service.api.structured.grammar_worker import Tried, TryGrammar
from service.api.structured.schema_form import Unfit, shown
from service.confined.channel import WorkerChannel
from service.confined.workers import FairSemaphore, Program, WorkerLimits, WorkerLost, WorkerPool
from service.link.sampling_limits import SLOW_SECONDS
from service.settings.types import MIB

log = logging.getLogger(__name__)

GRAMMAR_LIMITS = WorkerLimits(memory_bytes=1024 * MIB, cpu_seconds=2, wall_seconds=20.0)
"""Limits of one check. The library's own budgets end almost every check within one second."""
WAIT_SECONDS = 30.0
"""Seconds that a request waits at most for its turn and its grammar, and as many for its turn and the check."""
MAKING = 1
"""Number of grammars that are made at a time, in a thread that shares the interpreter with the event loop."""
PROCESSES, EACH = 3, 2
"""Number of grammars that are tried at a time, each in its own process, and of one client."""
_MOST_REMEMBERED = 1024
_RETRY_AFTER = 2.0


PROGRAM = Program("service.api.structured.grammar_worker", Tried)

T = TypeVar("T")


class GrammarChecks:
    """Belongs to one event loop. Its processes start with the first grammars that need them."""

    def __init__(self) -> None:
        self.workers = WorkerPool(PROCESSES, GRAMMAR_LIMITS, PROGRAM)
        self._making, self._trying = FairSemaphore(MAKING), FairSemaphore(PROCESSES, EACH)
        self._makers = ThreadPoolExecutor(MAKING, thread_name_prefix="grammars")
        self._results: OrderedDict[bytes, Tried] = OrderedDict()
        """Results for the grammars that were tried lately, by hash."""

    async def checked(self, make: Callable[[], str], field: str, client: str = "") -> str:
        """The grammar that `make` returns. ApiError 400 that names `field` and the reason if it cannot be used: it is
        over a limit, cannot be built, matches nothing or costs too much; 503 if its turn does not come. client:
        identifies the client, since clients take turns."""
        grammar, tried = await self.tried(make, field, client)
        if tried.problem:
            raise refusal(field, tried)
        return grammar

    async def tried(self, make: Callable[[], str], field: str, client: str) -> tuple[str, Tried]:
        """(the grammar that `make` returns, how it fared). ApiError as `checked` for one that could not be tried."""
        try:
            grammar = await self.made(lambda: self._bounded(make), client)
            return grammar, await self._result(grammar, client)
        except (msgspec.DecodeError, RecursionError):
            raise bad_request(f"{field}: not the text of a JSON object.", field) from None
        except Unfit as unfit:
            raise refusal(field, Tried(str(unfit))) from None

    async def made(self, make: Callable[[], T], client: str) -> T:
        """The result of `make`, which runs in a thread when it is the client's turn. ApiError 503 if it takes too
        long until then."""
        async with _in_time(), self._making.acquire(client):
            return await asyncio.get_running_loop().run_in_executor(self._makers, make)

    def _bounded(self, make: Callable[[], str]) -> str:
        """The grammar that `make` returns. Unfit if it is too large."""
        grammar = make()
        check_size(len(grammar.encode(errors="replace")))
        return grammar

    def is_slow(self, grammar: str) -> bool:
        """Whether trying it took long, as building it will; False if that is not known any more."""
        tried = self._results.get(_digest(grammar))
        return tried is not None and tried.cpu_seconds > SLOW_SECONDS

    async def _result(self, grammar: str, client: str) -> Tried:
        key = _digest(grammar)
        if key not in self._results:
            self._results[key] = await self._tried(grammar, client)
            if len(self._results) > _MOST_REMEMBERED:
                self._results.popitem(last=False)
        self._results.move_to_end(key)
        return self._results[key]

    async def _tried(self, grammar: str, client: str) -> Tried:
        """Unfit for a grammar that ends the process. This result is not kept, since the machine may have been busy."""

        def job(channel: WorkerChannel) -> Tried:
            channel.send(TryGrammar(grammar))
            answer: Tried = channel.receive()
            return answer

        try:
            async with _in_time(), self._trying.acquire(client):
                return await self.workers.run(job)
        except WorkerLost as lost:
            log.warning("a grammar of %d characters ended the process that checked it: %s", len(grammar), lost)
            raise Unfit("too complex: checking it takes more time, memory or stack than allowed") from None

    def close(self) -> None:
        """Ends the processes and threads."""
        self._makers.shutdown(wait=False, cancel_futures=True)
        self.workers.close()


def refusal(field: str, tried: Tried) -> ApiError:
    at = f"{shown(tried.path)}: " if tried.path else ""
    return bad_request(f"{field}: {at}{tried.problem}.", field, "invalid_grammar")


@asynccontextmanager
async def _in_time() -> AsyncIterator[None]:
    """Bounds the time inside it. ApiError 503 when it is over."""
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            yield
    except TimeoutError:
        message = "The server is busy with checking grammars; retry shortly."
        raise ApiError(503, message, code="overloaded", retry_after=_RETRY_AFTER) from None


def _digest(grammar: str) -> bytes:
    return sha256(grammar.encode(errors="surrogatepass")).digest()
