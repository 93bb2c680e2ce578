"""What guided rows cost: all guided against none, to free rows beside them, and gaps while grammars are built.

    python -m benchmarks.guided [MODEL] [--tiny]

Rounds with and without a schema alternate on one server, and medians are compared. Answers are cut at the same number
of tokens. Free rows are counted alone, beside a few more free rows, and beside as many guided ones. Then free rows are
watched while every tenth of a second a request with a schema that is new comes. Full size and random weights; --tiny
serves the embedded model instead, to try the script.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.checkpoints import SIZES, make
from benchmarks.record import Row, record
from benchmarks.server import Server, random_weights, serve

ROUNDS = 5
FREE_ROWS = 16
"""Watched while grammars are built."""
BESIDE = ("none", "free", "guided")
NEW_SCHEMA_EVERY = 0.1
TINY_MODEL = "reprise/qwen2_vl"


@dataclass(frozen=True)
class Scale:
    """rows: of the comparison of all with none. counted: free rows with others beside them, `beside` of them."""

    rows: tuple[int, ...]
    tokens: int
    counted: int
    beside: int


FULL = Scale((32, 64), 256, 32, 8)
TINY = Scale((2,), 12, 2, 1)


def invoice(number: int = 0) -> dict[str, Any]:
    """A schema whose answers are longer than any round; other numbers make other grammars."""
    line = {
        "type": "object",
        "properties": {
            "article": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"},
            "description": {"type": "string", "maxLength": 60},
            "quantity": {"type": "integer", "minimum": 1, "maximum": 1000 + number},
            "price": {"type": "number", "minimum": 0},
            "unit": {"enum": ["piece", "kg", "hour", "box"]},
        },
        "required": ["article", "description", "quantity", "price", "unit"],
        "additionalProperties": False,
    }
    lines = {"type": "array", "items": line, "minItems": 200}
    names = {"customer": {"type": "string", "maxLength": 40}, "date": {"type": "string", "format": "date"}}
    return {
        "type": "object",
        "properties": {**names, "lines": lines},
        "required": ["customer", "date", "lines"],
        "additionalProperties": False,
    }


def body(model: str, tokens: int, seed: int, schema: dict[str, Any] | None) -> dict[str, Any]:
    guided = {} if schema is None else {"guided_json": schema}
    message = {"role": "user", "content": f"Invoice {seed}, please."}
    sampling = {"temperature": 1.0, "seed": seed, "max_tokens": tokens, "ignore_eos": True}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    return {"model": model, "messages": [message], **sampling, **options, **guided}


async def stream(client: httpx.AsyncClient, request: dict[str, Any]) -> tuple[int, list[float]]:
    """Tokens of an answer, and the times of its events."""
    tokens, times = 0, []
    async with client.stream("POST", "/v1/chat/completions", json=request) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
                tokens = (json.loads(line[6:]).get("usage") or {}).get("completion_tokens", tokens)
    return tokens, times


async def rate(client: httpx.AsyncClient, model: str, rows: int, tokens: int, guided: bool) -> float:
    """Tokens a second of all rows."""
    schema = invoice() if guided else None
    return per_second(
        await asyncio.gather(*(stream(client, body(model, tokens, seed, schema)) for seed in range(rows)))
    )


async def rate_beside(client: httpx.AsyncClient, model: str, scale: Scale, beside: str) -> float:
    """Tokens a second of the free rows that are counted; the others last twice as long."""
    schema = invoice() if beside == "guided" else None
    seeds = () if beside == "none" else range(scale.counted, scale.counted + scale.beside)
    others = [asyncio.ensure_future(stream(client, body(model, 2 * scale.tokens, seed, schema))) for seed in seeds]
    counted = await rate(client, model, scale.counted, scale.tokens, guided=False)
    for other in others:
        other.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    return counted


def per_second(answers: Sequence[tuple[int, list[float]]]) -> float:
    """Tokens a second from the first event of the last row to begin until the first row ends; of the whole time where
    no such moment is, as of a few tokens at --tiny."""
    begin, end = max(times[0] for _, times in answers), min(times[-1] for _, times in answers)
    inside = sum(1 for _, times in answers for at in times if begin < at <= end)
    events = sum(len(times) for _, times in answers)
    tokens = sum(count for count, _ in answers)
    if begin < end:
        return inside / (end - begin) * tokens / events
    return tokens / (max(times[-1] for _, times in answers) - min(times[0] for _, times in answers))


async def gaps(client: httpx.AsyncClient, model: str, tokens: int, numbers: Iterator[int] | None) -> list[float]:
    """Longest gap between events of each free row, in seconds. numbers: of new schemas that come meanwhile."""
    free = asyncio.gather(*(stream(client, body(model, tokens, seed, None)) for seed in range(FREE_ROWS)))
    others = []
    while not free.done():
        if numbers is not None:
            number = next(numbers)
            others.append(asyncio.ensure_future(stream(client, body(model, 2, number, invoice(number)))))
        await asyncio.sleep(NEW_SCHEMA_EVERY)
    await asyncio.gather(*others)
    return [max(late - soon for soon, late in itertools.pairwise(times[2:])) for _, times in await free]


async def measured(server: Server, model: str, scale: Scale) -> list[Row]:
    found: list[Row] = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits) as client:
        for rows in scale.rows:
            rates: dict[bool, list[float]] = {False: [], True: []}
            for round_, guided in itertools.product(range(ROUNDS + 1), (False, True)):
                value = await rate(client, model, rows, scale.tokens, guided)
                if round_:  # The first one of each captures and warms up.
                    rates[guided].append(value)
            free, guided_rate = (statistics.median(rates[guided]) for guided in (False, True))
            loss = 1 - guided_rate / free if free else 0.0
            found.append({"rows": rows, "free_tokens_s": free, "guided_tokens_s": guided_rate, "loss": loss})
        found.append(await measured_beside(client, model, scale))
        numbers = itertools.count(1)
        longest: dict[bool, list[float]] = {False: [], True: []}
        for _, built in itertools.product(range(ROUNDS), (False, True)):
            longest[built] += await gaps(client, model, scale.tokens, numbers if built else None)
        quiet, busy = (statistics.median(longest[built]) for built in (False, True))
        found.append({"rows": FREE_ROWS, "longest_gap_s": quiet, "longest_gap_beside_new_schemas_s": busy})
    return found


async def measured_beside(client: httpx.AsyncClient, model: str, scale: Scale) -> Row:
    """loss_beside: what guided rows take from free ones, that is, more than as many free rows take."""
    rates: dict[str, list[float]] = {beside: [] for beside in BESIDE}
    for round_, beside in itertools.product(range(ROUNDS + 1), BESIDE):
        value = await rate_beside(client, model, scale, beside)
        if round_:
            rates[beside].append(value)
    medians = {beside: statistics.median(values) for beside, values in rates.items()}
    row: Row = {f"counted_tokens_s_beside_{beside}": median for beside, median in medians.items()}
    loss = 1 - medians["guided"] / medians["free"] if medians["free"] else 0.0
    return {"rows": scale.counted, "beside": scale.beside, **row, "loss_beside": loss}


def run(model: str, scale: Scale, flags: Sequence[str]) -> Iterator[tuple[Row, dict[str, Any]]]:
    with serve(*flags) as server:
        server.wait_for_captures()
        for row in asyncio.run(measured(server, model, scale)):
            yield row, server.facts()


def main(words: Sequence[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.guided", description=__doc__)
    parser.add_argument("model", nargs="?", default="qwen2_vl_2b", choices=[n for n in SIZES if n != "voxcpm2"])
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args(words)
    scale, model = (TINY, TINY_MODEL) if arguments.tiny else (FULL, arguments.model)
    with tempfile.TemporaryDirectory() as folder:
        hosted = [] if arguments.tiny else random_weights([make(model, Path(folder))])
        settings = [
            "--max-in-flight",
            "1024",
            "--max-running",
            str(max(*scale.rows, scale.counted + scale.beside, FREE_ROWS + 16)),
        ]
        name = f"guided_{'tiny' if arguments.tiny else model}"
        return record(name, run(model, scale, [*hosted, *settings]), model=model, flags=settings)


if __name__ == "__main__":
    main()
