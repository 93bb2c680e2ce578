"""Vectors of Qwen3-VL-Embedding-2B through HTTP, of new pictures and of new texts, beside what the graphs of its
encoder and its prefills alone allow.

    python -m benchmarks.embeddings [--tiny]

Random weights of the published sizes; --tiny takes a miniature on the CPU, to try the script. The clients are processes
of their own, which make their requests beforehand. Of the seconds the second half counts.
"""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from benchmarks.checkpoints.published import GOLDEN
from benchmarks.checkpoints.served import served_directory
from benchmarks.measure.command_line import command_line
from benchmarks.measure.record import Row, record
from benchmarks.measure.timing import milliseconds
from benchmarks.servers.process import random_weights, serve
from benchmarks.steps.decoder import captured_prefill
from benchmarks.steps.encoder import fitting_bucket, pictures, plans_of, served_buckets
from benchmarks.steps.full_size import captured, load
from models.checkpoints.registry import family_of, resolve
from service.cli.bench.traffic import Connection, peer_of, picture, text
from service.engine.start import engine_stream
from service.graphs.pool import GraphPool

NAME, TEXTS = "Qwen3-VL-Embedding-2B", 16
"""TEXTS: of a request."""
WORDS, SECONDS = 110, 12.0
"""WORDS: of a text, which has more than 128 tokens with the template."""


@dataclass(frozen=True)
class Load:
    """lanes: requests that each of the `processes` keeps open. prepared: requests of a lane that are made
    beforehand."""

    url: str
    kind: str
    processes: int
    lanes: int
    seconds: float
    side: int
    words: int
    prepared: int


_together: Barrier
"""Of this process as a client: where all of them wait until each has prepared its requests."""


def _wait_at(barrier: Barrier) -> None:
    global _together
    _together = barrier


def body(load: Load, rng: np.random.Generator) -> bytes:
    asked: dict[str, Any] = {"model": NAME, "encoding_format": "base64"}
    if load.kind == "texts":
        asked["input"] = [text(rng, load.words) for _ in range(TEXTS)]
    else:
        url = f"data:image/jpeg;base64,{base64.b64encode(picture(rng, load.side, load.side)).decode()}"
        asked["messages"] = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    return json.dumps(asked).encode()


def client(load: Load, seed: int) -> list[tuple[float, float, int, int]]:
    """Of each answer: when it came, in seconds from the start, how many it took, the number of vectors, and tokens."""
    rng = np.random.default_rng(seed)
    made = [body(load, rng) for _ in range(load.prepared * load.lanes)]
    done: list[tuple[float, float, int, int]] = []
    _together.wait()
    begin = time.monotonic()

    async def lane() -> None:
        connection = Connection(peer_of(load.url, None), 60.0)
        while (sent := time.monotonic()) < begin + load.seconds:
            response = await connection.request("POST", "/v1/embeddings", made.pop() if made else body(load, rng))
            answer = json.loads(b"".join([piece async for piece in connection.body()]))
            if response.status_code != 200:
                raise RuntimeError(str(answer))
            now = time.monotonic()
            done.append((now - begin, now - sent, len(answer["data"]), answer["usage"]["prompt_tokens"]))

    async def lanes() -> None:
        await asyncio.gather(*(lane() for _ in range(load.lanes)))

    asyncio.run(lanes())
    return done


def over_http(load: Load) -> Row:
    spawn = get_context("spawn")
    barrier = spawn.Barrier(load.processes)
    with ProcessPoolExecutor(load.processes, spawn, initializer=_wait_at, initargs=(barrier,)) as pool:
        done = [one for told in pool.map(client, [load] * load.processes, range(load.processes)) for one in told]
    counted = [one for one in done if load.seconds / 2 < one[0] <= load.seconds]
    vectors = sum(count for _, _, count, _ in counted)
    return {
        "what": load.kind,
        "open": load.processes * load.lanes,
        "per_s": vectors / (load.seconds / 2),
        "latency_p50_ms": 1e3 * median(took for _, took, _, _ in counted),
        "tokens": sum(tokens for *_, tokens in counted) / vectors,
    }


def graphs_alone(directory: Path, device: torch.device, side: int, tokens: dict[str, int], most: int) -> Iterator[Row]:
    """Vectors a second that replays of encoder passes and prefills allow, with the number of pictures or texts in a
    pass that is best. tokens: of a prompt, by kind. most: tokens of a prefill."""
    model, pool = load(directory, device), GraphPool(device, 16 << 30)
    encoder, processor = model.encoder, resolve(family_of(directory).processor)(directory)
    encoding = float("inf")
    for count in (1, 2, 4, 8):
        _, build = pictures(side, side, count)
        (plan, *more) = plans_of(encoder, build(processor), encoder.default_buckets()[-1])
        if more:
            break
        runner = captured(NAME, "encoder", encoder, [fitting_bucket(served_buckets(encoder, plan), plan)], pool)
        encoding = min(encoding, milliseconds(partial(runner.run, plan), repeats=15)["median"] / count)
    for kind, length in tokens.items():
        prefill = float("inf")
        for count in sorted({1, min(4, most // length), max(1, most // length)} - {0}):
            runner, plan = captured_prefill(NAME, model.decoder, count * length, pool)
            prefill = min(prefill, milliseconds(partial(runner.run, plan), repeats=15)["median"] / count)
        whole = prefill + (encoding if kind == "pictures" else 0.0)
        yield {"what": f"graphs of {kind}", "per_s": 1e3 / whole, "tokens": length}


def measured(tiny: bool) -> Iterator[tuple[Row, dict[str, Any]]]:
    device = torch.device("cpu") if tiny else torch.device("cuda", 0)
    side, most, words, processes, prepared = (56, 64, 4, 2, 4) if tiny else (448, 2048, WORDS, 8, 120)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / NAME
        if tiny:
            shutil.copytree(GOLDEN / "qwen3_vl", directory, ignore=shutil.ignore_patterns("*.safetensors"))
        else:
            served_directory("qwen3_vl_2b", Path(folder)).rename(directory)
        flags = ["--max-in-flight", "4096", "--max-waiting", "2048"]
        flags += ["--device", "cpu", "--kv-cache-tokens", "4096"] if tiny else ["--kv-cache-tokens", "131072"]
        tokens: dict[str, int] = {}
        with serve(*random_weights([directory]), *flags) as server:
            server.wait_until_idle()
            for kind, lanes in (("pictures", 2 if tiny else 16), ("texts", 2 if tiny else 4)):
                found = over_http(Load(server.url, kind, processes, lanes, SECONDS, side, words, prepared))
                tokens[kind] = round(found["tokens"])
                facts = server.facts()
                yield found, facts
        with torch.inference_mode(), engine_stream(device):
            for found in graphs_alone(directory, device, side, tokens, most):
                yield found, facts


def main(words: Sequence[str] | None = None) -> Path:
    parser = command_line("benchmarks.embeddings", __doc__)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args(words)
    return record(f"embeddings_2b{'_tiny' if given.tiny else ''}", measured(given.tiny))


if __name__ == "__main__":
    main()
