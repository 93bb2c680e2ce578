"""Grammars of requests: made, bounded, and tried in confined processes before the engine sees them."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from hashlib import sha256

import msgspec

from service.api.chat.grammar import Unfit, check_bounds
from service.api.chat.grammar_worker import Tried, TryGrammar
from service.api.http.errors import ApiError, bad_request
from service.link.grammar_limits import CHECK_STACK_BYTES, library_variables
from service.media.channel import WorkerChannel
from service.media.limits import MIB, WorkerLimits
from service.media.workers import Program, WorkerLost, WorkerPool

log = logging.getLogger(__name__)

GRAMMAR_LIMITS = WorkerLimits(memory_bytes=1024 * MIB, cpu_seconds=2, wall_seconds=20.0)
"""Of one check. The budgets of the library end almost every one within a second of processor time."""
WAIT_SECONDS = 30.0
"""What a request waits at most for its turn and its check."""
WORKERS = 2
_MOST_REMEMBERED = 1024
_RETRY_AFTER = 2.0


PROGRAM = Program("service.api.chat.grammar_worker", Tried, library_variables(CHECK_STACK_BYTES))


class GrammarChecks:
    """Belongs to one event loop. Its processes start with the first grammars that need them."""

    def __init__(self, limits: WorkerLimits = GRAMMAR_LIMITS, program: Program = PROGRAM) -> None:
        self.workers = WorkerPool(WORKERS, limits, program)
        self._results: OrderedDict[bytes, str] = OrderedDict()
        """Problems of the grammars that were tried lately, by hash."""

    async def checked(self, make: Callable[[], str], field: str) -> str:
        """The grammar that `make` returns. ApiError 400 that names `field` and the reason if it cannot be used: it is
        over a limit, cannot be built, matches nothing or costs too much; 503 if its turn does not come."""
        try:
            grammar = await asyncio.to_thread(make)
        except (msgspec.DecodeError, RecursionError):
            raise bad_request(f"{field}: not the text of a JSON object.", field) from None
        try:
            problem = await self._problem(grammar)
        except Unfit as unfit:
            problem = str(unfit)
        if problem:
            raise bad_request(f"{field}: {problem}.", field, "invalid_grammar")
        return grammar

    async def _problem(self, grammar: str) -> str:
        key = sha256(grammar.encode(errors="surrogatepass")).digest()
        if key not in self._results:
            await asyncio.to_thread(check_bounds, grammar)
            self._results[key] = await self._tried(grammar)
            if len(self._results) > _MOST_REMEMBERED:
                self._results.popitem(last=False)
        self._results.move_to_end(key)
        return self._results[key]

    async def _tried(self, grammar: str) -> str:
        """Unfit for a grammar that ends the process. That is not remembered: the machine may have been busy."""

        def job(channel: WorkerChannel) -> str:
            channel.send(TryGrammar(grammar))
            answer: Tried = channel.receive()
            return answer.problem

        try:
            async with asyncio.timeout(WAIT_SECONDS):
                return await self.workers.run(job)
        except WorkerLost as lost:
            log.warning("a grammar of %d characters ended the process that checked it: %s", len(grammar), lost)
            raise Unfit("too complex: checking it takes more time, memory or stack than allowed") from None
        except TimeoutError:
            message = "The server is busy with checking grammars; retry shortly."
            raise ApiError(503, message, code="overloaded", retry_after=_RETRY_AFTER) from None

    def close(self) -> None:
        """Ends the processes."""
        self.workers.close()
