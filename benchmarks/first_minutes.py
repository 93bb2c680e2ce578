"""What clients wait for right after a server is ready, while it captures and makes voices, and once it has settled.

    python -m benchmarks.first_minutes [CHAT_MODEL] [--seconds 100] [--rate 0.5] [--tiny]

A chat and a speech model of full size on one GPU, random weights; --tiny serves the embedded models. Chats about a new
picture and live speech arrive at random (Poisson), so rarely that the engine idles between them and goes on with what
it has to do in the background: how much later an answer begins than after settling is what that costs.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.checkpoints.published import SIZES, make
from benchmarks.checkpoints.served import served_directory
from benchmarks.measure.record import Row, record
from benchmarks.servers.process import Server, random_weights, serve
from service.cli.bench.run import Clients, run_together, summary
from service.cli.bench.traffic import AnyLoad, ChatLoad, SpeechLoad

SPEECH = "voxcpm2"


def loads(server: Server, names: Sequence[str], rate: float, seconds: float, tiny: bool, seed: int) -> list[AnyLoad]:
    side = 56 if tiny else 448
    common: dict[str, Any] = {"url": server.url, "requests": max(1, round(rate * seconds)), "rate": rate, "warmup": 0}
    chat = ChatLoad(model=names[0], seed=seed, width=side, height=side, text_words=32, output_tokens=16, **common)
    return [chat, SpeechLoad(model=names[1], seed=seed, text_words=8, seconds=1.28, **common)]


def measured(
    server: Server, names: Sequence[str], arguments: argparse.Namespace
) -> Iterator[tuple[Row, dict[str, Any]]]:
    """A row for each load, from readiness on and after settling, with the captures that were made meanwhile."""
    for seed, when in enumerate(("from readiness on", "settled")):
        captures, began = server.captures(), time.time()
        found = loads(server, names, arguments.rate, arguments.seconds, arguments.tiny, seed + 1)
        records = run_together(*(Clients(load, 1) for load in found))
        made = server.captures() - captures
        for load, each in zip(found, records, strict=True):
            result = summary(load, each)
            row: Row = {"when": when, "load": "chat" if isinstance(load, ChatLoad) else "speech", "captures": made}
            row |= {name: result[name] for name in ("requests", "succeeded", "refused", "failed")}
            answered = sorted(
                (1e3 * one.first, one.start - began) for one in each if not one.error and one.first is not None
            )
            if not answered:
                raise RuntimeError(f"no {row['load']} was answered: {each[0].status} {each[0].message}")
            row |= {"first_p50_ms": answered[len(answered) // 2][0], "first_max_ms": answered[-1][0]}
            row["slowest"] = [{"first_ms": first, "at_s": at} for first, at in answered[-8:]]
            yield row, server.facts()
        if when != "settled":
            server.wait_until_idle()


def main(words: Sequence[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.first_minutes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    chats = [name for name, (source, _, _) in SIZES.items() if source.startswith("qwen")]
    parser.add_argument("chat_model", nargs="?", default="qwen2_vl_2b", choices=chats)
    parser.add_argument("--seconds", type=float, default=100.0, help="of each measurement")
    parser.add_argument("--rate", type=float, default=0.5, help="chats a second, and as many utterances")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args(words)
    names = ["reprise/qwen2_vl", "reprise/voxcpm2"] if arguments.tiny else [arguments.chat_model, SPEECH]

    def served() -> Iterator[tuple[Row, dict[str, Any]]]:
        with tempfile.TemporaryDirectory() as folder:
            parent = Path(folder)
            made = [] if arguments.tiny else [served_directory(arguments.chat_model, parent), make(SPEECH, parent)]
            flags = random_weights(made) if made else []
            with serve(*flags, "--voices-dir", str(parent / "voices")) as server:
                yield from measured(server, names, arguments)

    name = f"first_minutes_{'tiny' if arguments.tiny else arguments.chat_model}"
    return record(name, served(), chat_model=names[0], speech_model=SPEECH, rate=arguments.rate)


if __name__ == "__main__":
    main()
