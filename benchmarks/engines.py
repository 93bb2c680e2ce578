"""Chat and speech through HTTP with engines on one GPU and on several of one host, alternately.

    python -m benchmarks.engines [chat] [conversations] [speech] [--gpus 1 2] [--rounds 3] [--per-gpu] [--tiny]

Full size and random weights. A server with `--gpus 1` and one with `--gpus 2` stay up together and take the same load
in turn, so that drifts of the host affect both. The load is closed and large enough for the largest number of GPUs;
with --per-gpu a smaller number gets its share of it, so that each GPU has the same to do. --tiny takes the embedded
models and engines on the CPU, to try the script.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.checkpoints.published import make
from benchmarks.loads.rows import SOLVER_STEPS, row_of
from benchmarks.measure.command_line import command_line
from benchmarks.measure.record import Row, record
from benchmarks.servers.process import Server, random_weights, serve
from service.cli.bench.run import run_load
from service.cli.bench.traffic import AnyLoad, ChatLoad, SpeechLoad

CHAT, SPEECH = "qwen2_vl_2b", "voxcpm2"
GPUS = (1, 2)
MEMORY = ["--kv-cache-tokens", "262144", "--graph-memory", str(8 << 30)]
"""The same for each engine: a share would count what other servers take of the same GPU."""
REASONS = ("affinity", "spilled", "load", "moved")


@dataclass(frozen=True)
class Scale:
    """chats, listeners: number that is open at any time. each: requests, conversations and utterances for each of
    them."""

    chat_model: str
    speech_model: str
    chats: int
    listeners: int
    each: int
    side: int
    tokens: int
    seconds: float
    api_processes: int
    client_processes: int
    max_running: int


FULL = Scale(CHAT, SPEECH, 256, 128, 4, 448, 128, 10.08, 4, 16, 128)
TINY = Scale("reprise/qwen2_vl", "reprise/voxcpm2", 4, 4, 2, 56, 8, 0.64, 1, 1, 4)


def chat(url: str, scale: Scale, seed: int, turns: int = 1) -> ChatLoad:
    """New pictures and new text in each request."""
    return ChatLoad(
        url=url,
        model=scale.chat_model,
        requests=scale.each * scale.chats,
        seed=seed,
        concurrency=scale.chats,
        width=scale.side,
        height=scale.side,
        output_tokens=scale.tokens,
        turns=turns,
    )


def conversations(url: str, scale: Scale, seed: int) -> ChatLoad:
    """Four turns about one picture, whose embedding and prefix are in one engine's caches."""
    return chat(url, scale, seed, turns=4)


def speech(url: str, scale: Scale, seed: int) -> SpeechLoad:
    """Utterances of a fixed length; each client starts the next one when the last has ended."""
    return SpeechLoad(
        url=url,
        model=scale.speech_model,
        requests=scale.each * scale.listeners,
        seed=seed,
        concurrency=scale.listeners,
        seconds=scale.seconds,
        solver_steps=SOLVER_STEPS,
    )


LOADS: dict[str, Callable[[str, Scale, int], AnyLoad]] = {
    "chat": chat,
    "conversations": conversations,
    "speech": speech,
}


def measured(
    kinds: Sequence[str], counts: Sequence[int], rounds: int, scales: Mapping[int, Scale], tiny: bool
) -> Iterator[tuple[Row, dict[str, Any]]]:
    """A row for each round, kind of load and number of GPUs, and the facts that its server reports. scales: by number
    of GPUs. All servers stay up, so that only the load changes."""
    models = sorted({SPEECH if kind == "speech" else CHAT for kind in kinds})
    hosts = [(model, count) for model in models for count in counts]
    with ExitStack() as stack, ThreadPoolExecutor() as starts:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        weights = {model: [] if tiny else random_weights([make(model, folder)]) for model in models}
        begun = [
            starts.submit(stack.enter_context, serve(*weights[model], *flags(count, scales[count], tiny)))
            for model, count in hosts
        ]
        servers = dict(zip(hosts, (start.result() for start in begun), strict=True))
        for server in servers.values():
            server.wait_until_idle()
        for number, kind, count in product(range(rounds), kinds, counts):
            server = servers[SPEECH if kind == "speech" else CHAT, count]
            found = row(server, kind, count, scales[count], seed=number * len(LOADS) + list(LOADS).index(kind))
            yield {"load": kind, "round": number, **found}, server.facts()


def share(scale: Scale, count: int, most: int) -> Scale:
    """The load of `count` GPUs where `scale` is that of `most`."""
    return replace(scale, chats=scale.chats * count // most, listeners=scale.listeners * count // most)


def flags(count: int, scale: Scale, tiny: bool) -> list[str]:
    engines = ["--engines", str(count), "--device", "cpu"] if tiny else ["--gpus", str(count)]
    limits = ["--max-in-flight", "4096", "--max-waiting", "2048", "--max-running", str(scale.max_running)]
    memory = [] if tiny else MEMORY
    return [*engines, *limits, *memory, "--api-processes", str(scale.api_processes)]


def row(server: Server, kind: str, count: int, scale: Scale, seed: int) -> Row:
    """The clients' measurements, and how the engines shared the work."""
    before = shares(server) if count > 1 else {}
    load = LOADS[kind](server.url, scale, seed)
    records = run_load(load, processes=min(scale.client_processes, load.concurrency))
    found: Row = {"gpus": count, "at_once": load.concurrency, **row_of(load, records)}
    if count > 1:
        for name, values in shares(server).items():
            found[name] = {key: value - before[name].get(key, 0.0) for key, value in values.items()}
    return found


def shares(server: Server) -> dict[str, dict[str, float]]:
    """Steps of each engine, and requests by the reason for which they went to theirs."""
    choices = {reason: server.metric("reprise_engine_choices_total", reason=reason) for reason in REASONS}
    return {"steps_by_engine": server.samples("reprise_steps_total", "engine"), "choices": choices}


def main(words: Sequence[str] | None = None) -> Path:
    parser = command_line("benchmarks.engines", __doc__)
    parser.add_argument("kinds", nargs="*", metavar="load", help=", ".join(LOADS))
    parser.add_argument("--gpus", nargs="+", type=int, default=list(GPUS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--per-gpu", action="store_true", help="a load in proportion to the GPUs")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(words)
    if unknown := [kind for kind in options.kinds if kind not in LOADS]:
        parser.error(f"unknown load {unknown[0]!r}; known are {', '.join(LOADS)}")
    scale = TINY if options.tiny else FULL
    kinds, most = options.kinds or list(LOADS), max(options.gpus)
    scales = {count: share(scale, count, most if options.per_gpu else count) for count in options.gpus}
    return record(
        f"engines{'_per_gpu' if options.per_gpu else ''}{'_tiny' if options.tiny else ''}",
        measured(kinds, options.gpus, options.rounds, scales, options.tiny),
        chat_model=scale.chat_model,
        speech_model=scale.speech_model,
        gpus=options.gpus,
    )


if __name__ == "__main__":
    main()
