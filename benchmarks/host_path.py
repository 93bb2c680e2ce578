"""A first token's way beside the GPU: from the client's socket through both processes and back, by stage, on a CPU.
With `--gpu voxcpm2` that of a first piece of audio.

    python -m benchmarks.host_path [--old CHECKOUT] [--rounds 8] [--name host_path]
    python -m benchmarks.host_path --gpu qwen2_vl_2b [--rounds 2]       # host_path_gpu_qwen2_vl_2b

Real clients, API process, pictures, tokenizer of published size and engine; the GPU is simulated
(benchmarks.servers.simulated_gpu), so that the result says nothing of one, unless --gpu names a model of full size to
be served with random weights on the machine's own. `alone` asks one request at a time and takes the GPU's seconds away
from the time to its first token; `together` has several open and counts processor time of both processes for a request.
With --old another checkout's server runs beside this one's, and rounds alternate. Values are lower quartiles, since
other work on the machine only adds; those with p50 in their names medians.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from benchmarks.checkpoints.published import make
from benchmarks.checkpoints.served import miniature_directory, served_directory
from benchmarks.loads.raw_client import Answer, answers
from benchmarks.loads.speech import SOLVER_STEPS
from benchmarks.measure.record import Row, commit, record
from benchmarks.servers import simulated_gpu
from benchmarks.servers.footprint import processor_seconds
from benchmarks.servers.marked import MARKED_GPU, MARKS, POINTS, read_marks
from benchmarks.servers.process import Server, random_weights, serve
from service.cli.bench.spec import AnyLoad, ChatLoad, SpeechLoad
from service.cli.bench.traffic import payload

SETTINGS = ("--max-in-flight", "1024", "--max-waiting", "1024", "--max-running", "64", "--media-threads", "8")
TOKENS = 2
ALONE, TOGETHER = 40, 96
"""Requests of a round."""
LANES = (8, 32)
WARM_UP = 8


@dataclass(frozen=True)
class Input:
    name: str
    images: int
    words: int
    system_tokens: int
    side: int = 448
    """Pixels of a picture's width and height."""
    speech_seconds: float = 0.0
    """Of an utterance; 0: a chat."""

    @property
    def path(self) -> str:
        return "/v1/audio/speech" if self.speech_seconds else "/v1/chat/completions"


INPUTS = (
    Input("395 text tokens", 0, 360, 0),
    Input("224 x 224 JPEG, 128 words", 1, 128, 0, 224),
    Input("448 x 448 JPEG, 128 words", 1, 128, 0),
    Input("the same behind a system prompt of 500 words", 1, 128, 500),
    Input("1024 x 1024 JPEG, 128 words", 1, 128, 0, 1024),
)


SPEECH = "voxcpm2"
SPEECH_INPUTS = (Input("speech, 13 words", 0, 13, 0, speech_seconds=0.32),)


@dataclass(frozen=True)
class Side:
    """A server and the file of its marks."""

    name: str
    server: Server
    marks: Path
    model: str


def bodies(what: Input, count: int, seed: int, model: str) -> list[bytes]:
    rng = np.random.default_rng(seed)
    return [msgspec.json.encode(payload(_load(what, count, seed, model), rng)) for _ in range(count)]


def _load(what: Input, count: int, seed: int, model: str) -> AnyLoad:
    if what.speech_seconds:
        shape: dict[str, Any] = {"text_words": what.words, "seconds": what.speech_seconds}
        return SpeechLoad(url="", model=model, requests=count, seed=seed, solver_steps=SOLVER_STEPS, **shape)
    return ChatLoad(
        url="",
        model=model,
        requests=count,
        seed=seed,
        images=what.images,
        width=what.side,
        height=what.side,
        text_words=what.words,
        system_tokens=what.system_tokens,
        output_tokens=TOKENS,
    )


def alone(what: Input, side: Side, index: int) -> list[dict[str, float]]:
    """Milliseconds of each request of a round by stage, and host: all but the GPU's."""
    begin = side.marks.stat().st_size
    got = answers(side.server.url, bodies(what, ALONE, 100 + index, side.model), 1, what.path)
    with side.marks.open("rb") as file:
        file.seek(begin)
        marks = read_marks(file.read())
    return [stages(answer, marks) for answer in got]


def stages(answer: Answer, marks: list[tuple[str, float]]) -> dict[str, float]:
    """Each is named for the point that it ends at. The GPU's is what stands between launched and computed."""
    first = answer.began + answer.first
    times: dict[str, float] = {}
    for point, at in marks:
        if answer.began <= at <= first:
            times.setdefault(point, at)
    points = [answer.began, *(times[point] for point in POINTS), first]
    found = {f"{name}_ms": 1e3 * (b - a) for name, (a, b) in zip((*POINTS, "read"), pairwise(points), strict=True)}
    gpu = found.pop("computed_ms")
    return {"host_ms": 1e3 * answer.first - gpu, "gpu_ms": gpu, **found}


def together(what: Input, lanes: int, side: Side, index: int) -> list[dict[str, float]]:
    """Processor milliseconds of a request of a round, by role."""
    sent = bodies(what, TOGETHER, 1000 * lanes + index, side.model)
    before = processor_seconds(side.server.pid)
    got = answers(side.server.url, sent, lanes, what.path)
    after = processor_seconds(side.server.pid)
    cpu = {f"{role}_cpu_ms": 1e3 * (after[role] - before.get(role, 0.0)) / len(got) for role in ("api", "engine")}
    return [{**cpu, "first_p50_ms": 1e3 * statistics.median(answer.first for answer in got)}]


def _rounds(
    sides: Sequence[Side], count: int, one: Callable[[Side, int], list[dict[str, float]]]
) -> Iterator[tuple[str, list[dict[str, float]]]]:
    """What rounds measured of each side, by its name; they take turns in beginning."""
    found: dict[str, list[dict[str, float]]] = {side.name: [] for side in sides}
    for index in range(count):
        for side in sides if index % 2 else reversed(sides):
            found[side.name] += one(side, index)
    yield from found.items()


def measured(sides: Sequence[Side], rounds: int, inputs: Sequence[Input]) -> Iterator[tuple[Row, dict[str, Any]]]:
    for what in inputs:
        for side in sides:
            # A shared system prompt is cached from now on.
            answers(side.server.url, bodies(what, WARM_UP, 1, side.model), 4, what.path)
        for name, rows in _rounds(sides, rounds, partial(alone, what)):
            row = {stage: _low([row[stage] for row in rows]) for stage in rows[0]}
            middle = statistics.median(row["host_ms"] for row in rows)
            yield {"run": "alone", "code": name, "input": what.name, **row, "host_p50_ms": middle}, {}
        for lanes in LANES:
            for name, rows in _rounds(sides, rounds, partial(together, what, lanes)):
                row = {part: _low([row[part] for row in rows]) for part in rows[0]}
                middle = statistics.median(row["api_cpu_ms"] for row in rows)
                whole = {"run": "together", "code": name, "input": what.name, "lanes": lanes, **row}
                yield {**whole, "api_cpu_p50_ms": middle}, {}


def _low(values: Sequence[float]) -> float:
    """The lower quartile: other work on the machine only adds."""
    return float(np.quantile(values, 0.25))


def _directory(model: str | None, parent: Path) -> Path:
    """Of a model of full size for the machine's own GPU, or of the miniature for a simulated one."""
    if model is None:
        return miniature_directory(parent)
    return make(model, parent) if model == SPEECH else served_directory(model, parent)


def marked_server(checkout: Path | None) -> str:
    """Its module in this checkout, or in another one, which may be from before there was benchmarks/servers."""
    module = "benchmarks.servers.marked"
    here = checkout is None or (checkout / f"{module.replace('.', '/')}.py").exists()
    return module if here else "benchmarks.marked_server"


def main(words: Sequence[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.host_path", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--old", type=Path, help="a checkout whose server is measured alternately with this one's")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--gpu", metavar="MODEL", help="to be served on the machine's own GPU")
    parser.add_argument("--name", help="of the result")
    chosen = parser.parse_args(words)
    checkouts: dict[str, Path | None] = {"now": None} if chosen.old is None else {"before": chosen.old, "now": None}
    facts: dict[str, Any] = {"rounds": chosen.rounds} | ({} if chosen.gpu else {"simulated": "NVIDIA H100"})
    if chosen.old is not None:
        facts["before"] = commit(chosen.old)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        made = _directory(chosen.gpu, Path(folder))
        flags = [*random_weights([made]), *SETTINGS, "--api-processes", "1", "--log-level", "warning"]
        if not chosen.gpu:
            flags += ["--kv-cache-tokens", str(simulated_gpu.KV_CACHE_TOKENS)]
        sides = []
        for name, checkout in checkouts.items():
            marks = Path(folder) / name
            serving = serve(
                *flags,
                environment={MARKS: str(marks)} | ({MARKED_GPU: "1"} if chosen.gpu else {}),
                program=[marked_server(checkout)],
                checkout=checkout,
            )
            sides.append(Side(name, stack.enter_context(serving), marks, made.name))
            sides[-1].server.wait_until_idle()
        name = chosen.name or (f"host_path_gpu_{chosen.gpu}" if chosen.gpu else "host_path")
        return record(
            name,
            measured(sides, chosen.rounds, SPEECH_INPUTS if chosen.gpu == SPEECH else INPUTS),
            flags=list(SETTINGS),
            **facts,
        )


if __name__ == "__main__":
    main()
