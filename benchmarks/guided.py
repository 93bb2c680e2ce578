"""The cost of guided rows: all guided compared with none, their effect on unguided rows, and gaps while grammars are
built.

    python -m benchmarks.guided [MODEL] [--tiny]

Rounds with and without a schema alternate on one server, and medians are compared. Answers are cut at the same number
of tokens. Free (unguided) rows are counted alone, with a few more free rows, and with as many guided ones. Then free
rows are watched while a request with a new schema comes every tenth of a second. Full size, random weights and a
vocabulary of published size; --tiny serves the embedded model instead, to try the script.
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

from benchmarks.checkpoints.published import SIZES
from benchmarks.checkpoints.served import served_directory
from benchmarks.loads.invoices import invoice
from benchmarks.measure.record import Row, record
from benchmarks.servers.process import Server, random_weights, serve
from service.cli.bench.run import run_beside, run_load
from service.cli.bench.spec import ChatLoad, Record

ROUNDS = 5
FREE_ROWS = 16
"""Number of rows that are watched while grammars are built."""
PROCESSES = 4
"""Number of client processes."""
WORDS = 8
"""Words of a request."""
BESIDE = ("none", "free", "guided")
NEW_SCHEMA_EVERY = 0.1
TINY_MODEL = "reprise/qwen2_vl"


@dataclass(frozen=True)
class Scale:
    """rows: of the comparison of all guided with none. counted: free rows with `beside` other rows."""

    rows: tuple[int, ...]
    tokens: int
    counted: int
    beside: int


FULL = Scale((32, 64), 768, 32, 8)
TINY = Scale((2,), 12, 2, 1)


def body(model: str, tokens: int, seed: int, schema: dict[str, Any] | None) -> dict[str, Any]:
    guided = {} if schema is None else {"guided_json": schema}
    message = {"role": "user", "content": f"Invoice {seed}, please."}
    sampling = {"temperature": 1.0, "seed": seed, "max_tokens": tokens, "ignore_eos": True}
    options = {"stream": True, "stream_options": {"include_usage": True}}
    return {"model": model, "messages": [message], **sampling, **options, **guided}


async def stream(client: httpx.AsyncClient, request: dict[str, Any]) -> list[float]:
    """The times of an answer's events."""
    times = []
    async with client.stream("POST", "/v1/chat/completions", json=request) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())
    return times


def load(server: Server, model: str, rows: int, tokens: int, seed: int, *, guided: bool) -> ChatLoad:
    """`rows` rows at a time, all of which begin together."""
    return ChatLoad(
        url=server.url,
        model=model,
        requests=rows,
        seed=seed,
        concurrency=rows,
        warmup=0,
        images=0,
        text_words=WORDS,
        output_tokens=tokens,
        temperature=1.0,
        json_schema=json.dumps(invoice()) if guided else "",
    )


def rate(server: Server, model: str, rows: int, tokens: int, seed: int, *, guided: bool) -> float:
    """Tokens a second of all rows."""
    return per_second(run_load(load(server, model, rows, tokens, seed, guided=guided), processes=PROCESSES))


def rate_beside(server: Server, model: str, scale: Scale, seed: int, beside: str) -> float:
    """Tokens per second of the counted free rows; the others last twice as long."""
    counted = load(server, model, scale.counted, scale.tokens, seed, guided=False)
    if beside == "none":
        return per_second(run_load(counted, processes=PROCESSES))
    others = load(server, model, scale.beside, 2 * scale.tokens, seed + 1, guided=beside == "guided")
    return per_second(run_beside(counted, others, after=0.0, processes=PROCESSES)[0])


def per_second(records: Sequence[Record]) -> float:
    """Tokens a second of all rows between their first token and their last one."""
    assert all(record.status == 200 and not record.error for record in records)
    return sum((record.tokens - 1) / (record.duration - record.first) for record in records)


async def gaps(server: Server, model: str, tokens: int, numbers: Iterator[int] | None) -> list[float]:
    """Longest gap between events of each free row, in seconds. numbers: those of the new schemas that come in the
    meantime."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits) as client:
        free = asyncio.gather(*(stream(client, body(model, tokens, seed, None)) for seed in range(FREE_ROWS)))
        others = []
        while not free.done():
            if numbers is not None:
                number = next(numbers)
                others.append(asyncio.ensure_future(stream(client, body(model, 2, number, invoice(number)))))
            await asyncio.sleep(NEW_SCHEMA_EVERY)
        await asyncio.gather(*others)
        return [max(late - soon for soon, late in itertools.pairwise(times[2:])) for times in await free]


def measured(server: Server, model: str, scale: Scale) -> Iterator[Row]:
    seeds = itertools.count(1, 2)
    for rows in scale.rows:
        rates: dict[bool, list[float]] = {False: [], True: []}
        for round_, guided in itertools.product(range(ROUNDS + 1), (False, True)):
            value = rate(server, model, rows, scale.tokens, next(seeds), guided=guided)
            if round_:  # The first round of each captures and warms up.
                rates[guided].append(value)
        free, guided_rate = (statistics.median(rates[guided]) for guided in (False, True))
        yield {
            "rows": rows,
            "free_tokens_s": free,
            "guided_tokens_s": guided_rate,
            "loss": 1 - guided_rate / free,
            "mask_ms": 1e3 * mask_seconds(server),
        }
    yield measured_beside(server, model, scale, seeds)
    numbers = itertools.count(1)
    longest: dict[bool, list[float]] = {False: [], True: []}
    for _, built in itertools.product(range(ROUNDS), (False, True)):
        longest[built] += asyncio.run(gaps(server, model, scale.tokens, numbers if built else None))
    quiet, busy = (statistics.median(longest[built]) for built in (False, True))
    yield {"rows": FREE_ROWS, "longest_gap_s": quiet, "longest_gap_beside_new_schemas_s": busy}


def mask_seconds(server: Server) -> float:
    """Mean time of a step's masks since the server's start."""
    total, count = (server.metric(f"reprise_guided_mask_duration_seconds_{part}") for part in ("sum", "count"))
    return total / max(1.0, count)


def measured_beside(server: Server, model: str, scale: Scale, seeds: Iterator[int]) -> Row:
    """loss_beside: how much more guided rows slow down the free ones than as many free rows would."""
    rates: dict[str, list[float]] = {beside: [] for beside in BESIDE}
    for round_, beside in itertools.product(range(ROUNDS + 1), BESIDE):
        value = rate_beside(server, model, scale, next(seeds), beside)
        if round_:
            rates[beside].append(value)
    medians = {beside: statistics.median(values) for beside, values in rates.items()}
    row: Row = {f"counted_tokens_s_beside_{beside}": median for beside, median in medians.items()}
    loss = 1 - medians["guided"] / medians["free"]
    return {"rows": scale.counted, "beside": scale.beside, **row, "loss_beside": loss}


def run(model: str, scale: Scale, flags: Sequence[str]) -> Iterator[tuple[Row, dict[str, Any]]]:
    with serve(*flags) as server:
        server.wait_until_idle()
        for row in measured(server, model, scale):
            yield row, server.facts()


def main(words: Sequence[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.guided", description=__doc__)
    parser.add_argument("model", nargs="?", default="qwen2_vl_2b", choices=[n for n in SIZES if n != "voxcpm2"])
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args(words)
    scale, model = (TINY, TINY_MODEL) if arguments.tiny else (FULL, arguments.model)
    with tempfile.TemporaryDirectory() as folder:
        hosted = [] if arguments.tiny else random_weights([served_directory(model, Path(folder))])
        settings = [
            "--api-processes",
            "1" if arguments.tiny else "4",
            "--max-in-flight",
            "1024",
            "--max-running",
            str(max(*scale.rows, scale.counted + scale.beside, FREE_ROWS + 16)),
        ]
        name = f"guided_{'tiny' if arguments.tiny else model}"
        return record(name, run(model, scale, [*hosted, *settings]), model=model, flags=settings)


if __name__ == "__main__":
    main()
