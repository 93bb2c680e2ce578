"""The grammar that an answer must match: text in llguidance's JSON form, of bounded size.

A confined process tries it (grammar_worker.py), then the engine builds its matcher from it. Clients take turns at both,
and none holds all processes: the grammars of one client delay nobody else's.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Any, TypeVar

import llguidance
import msgspec

from service.api.http.errors import ApiError, invalid
from service.api.structured.grammar_worker import Tried, TryGrammar
from service.api.structured.schema_form import Unfit, as_grammar, schema_form, shown
from service.confined.channel import WorkerChannel
from service.confined.workers import FairSemaphore, Program, WorkerLimits, WorkerLost, WorkerPool
from service.voices import LruCache

log = logging.getLogger(__name__)

MAX_GRAMMAR_BYTES = 64 << 10
"""Bytes of a grammar in its JSON form, with which the cost of building it and of computing a mask grows."""
SLOW_SECONDS = 0.1
"""Processor time of a check above which the engine builds the grammar apart from others. Usual schemas take a few
milliseconds."""
MAX_SCHEMA_BYTES = 4 * MAX_GRAMMAR_BYTES
"""Bytes of a schema's JSON before it has the form of a grammar, which leaves a few keywords out. The tools of a request
may have as many together."""
_AROUND_CHOICE = len('"" | ')
"""Characters that a choice takes beside its own."""
GRAMMAR_LIMITS = WorkerLimits(memory_bytes=1 << 30, cpu_seconds=2, wall_seconds=20.0)
"""Limits of one check. The library's own budgets end almost every check within one second."""
WAIT_SECONDS = 30.0
"""Seconds that a request waits at most for its turn and its grammar, and as many for its turn and the check."""
MAKING = 1
"""Number of grammars that are made at a time, in a thread that shares the interpreter with the event loop."""
PROCESSES, EACH = 3, 2
"""Number of grammars that are tried at a time, each in its own process, and of one client."""
_MOST_REMEMBERED = 1024
_RETRY_AFTER = 2.0


def json_schema_grammar(schema: Mapping[str, Any]) -> str:
    """Grammar of answers that are JSON and valid against `schema`, which a check must accept. They have only names that
    it lists, unless it says that others are allowed. Unfit if it is too large or cannot be said in a grammar."""
    check_size(len(msgspec.json.encode(schema)), MAX_SCHEMA_BYTES)
    return form_grammar(schema_form(schema))


def form_grammar(form: Mapping[str, Any]) -> str:
    """Grammar of a schema that has its form already."""
    return _top_level({"json_schema": as_grammar(form)})


def regex_grammar(pattern: str) -> str:
    """Grammar of answers that match a regular expression as a whole, in the syntax of Rust's regex crate."""
    check_size(len(pattern))
    return llguidance.LLMatcher.grammar_from_regex(pattern)


def choice_grammar(choices: Sequence[str]) -> str:
    """Grammar of answers that are one of these strings."""
    check_size(sum(map(len, choices)) + _AROUND_CHOICE * len(choices))
    quoted = (json.dumps(choice, ensure_ascii=False) for choice in choices)
    return _top_level({"lark_grammar": f"start: CHOICE\nCHOICE: {' | '.join(quoted)}"})


def lark_grammar(text: str) -> str:
    """Grammar of answers that match a grammar in llguidance's dialect of Lark, without schemas."""
    check_size(len(text))
    if "%json" in text:
        raise Unfit("%json is not supported; use a schema as the whole format")
    return formed_lark_grammar(text)


def formed_lark_grammar(text: str) -> str:
    """Grammar of a text in Lark whose schemas have their form already."""
    return _top_level({"lark_grammar": text})


def check_size(size: int, most: int = MAX_GRAMMAR_BYTES) -> None:
    """size: the bytes of a grammar, or what is known of them before the time is spent to make it."""
    if size > most:
        raise Unfit(f"too large: {size} bytes, at most {MAX_GRAMMAR_BYTES} allowed as a grammar")


def _top_level(grammar: dict[str, Any]) -> str:
    return msgspec.json.encode({"grammars": [grammar]}).decode()


PROGRAM = Program("service.api.structured.grammar_worker", Tried)

T = TypeVar("T")


class GrammarChecks:
    """Belongs to one event loop. Its processes start with the first grammars that need them."""

    def __init__(self) -> None:
        self.workers = WorkerPool(PROCESSES, GRAMMAR_LIMITS, PROGRAM)
        self._making, self._trying = FairSemaphore(MAKING), FairSemaphore(PROCESSES, EACH)
        self._makers = ThreadPoolExecutor(MAKING, thread_name_prefix="grammars")
        self._results = LruCache[bytes, Tried](_MOST_REMEMBERED)
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

        def bounded() -> str:
            grammar = make()
            check_size(len(grammar.encode(errors="replace")))
            return grammar

        try:
            grammar = await self.made(bounded, client)
            return grammar, await self._tried(grammar, client)
        except (msgspec.DecodeError, RecursionError):
            raise invalid(field, "not the text of a JSON object") from None
        except Unfit as unfit:
            raise refusal(field, Tried(str(unfit))) from None

    async def made(self, make: Callable[[], T], client: str) -> T:
        """The result of `make`, which runs in a thread when it is the client's turn. ApiError 503 if it takes too
        long until then."""
        async with _in_time(), self._making.acquire(client):
            return await asyncio.get_running_loop().run_in_executor(self._makers, make)

    def is_slow(self, grammar: str) -> bool:
        """Whether trying it took long, as building it will; False if that is not known any more."""
        tried = self._results.get(_digest(grammar))
        return tried is not None and tried.cpu_seconds > SLOW_SECONDS

    async def _tried(self, grammar: str, client: str) -> Tried:
        """Unfit for a grammar that ends the process. This result is not kept, since the machine may have been busy."""
        key = _digest(grammar)
        if (known := self._results.get(key)) is not None:
            return known

        def job(channel: WorkerChannel) -> Tried:
            channel.send(TryGrammar(grammar))
            answer: Tried = channel.receive()
            return answer

        try:
            async with _in_time(), self._trying.acquire(client):
                tried = await self.workers.run(job)
        except WorkerLost as lost:
            log.warning("a grammar of %d characters ended the process that checked it: %s", len(grammar), lost)
            raise Unfit("too complex: checking it takes more time, memory or stack than allowed") from None
        self._results.put(key, tried)
        return tried

    def close(self) -> None:
        """End the processes and threads."""
        self._makers.shutdown(wait=False, cancel_futures=True)
        self.workers.close()


def refusal(field: str, tried: Tried) -> ApiError:
    at = f"{shown(tried.path)}: " if tried.path else ""
    return invalid(field, f"{at}{tried.problem}", "invalid_grammar")


@asynccontextmanager
async def _in_time() -> AsyncIterator[None]:
    """Bound the time inside it. ApiError 503 when it is over."""
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            yield
    except TimeoutError:
        message = "The server is busy with checking grammars; retry shortly."
        raise ApiError(503, message, code="overloaded", retry_after=_RETRY_AFTER) from None


def _digest(grammar: str) -> bytes:
    return sha256(grammar.encode(errors="surrogatepass")).digest()
