"""Steps of two checkouts on one GPU, alternately, so that a drift of the machine meets both.

    python -m benchmarks.versions OLD NEW [--models kimi_vl_a3b] [--rounds 5]

--models: these alone, in a result of their own, instead of all that fit on one GPU twice.

Each checkout loads its models and captures its steps in a process of its own, then both wait; a round times every step
in the one, then in the other. What is compared is the median of the rounds' medians, through the runner.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import IO

import torch

from benchmarks.checkpoints.published import make
from benchmarks.measure.command_line import command_line
from benchmarks.measure.record import write
from benchmarks.measure.timing import milliseconds
from benchmarks.steps.decoder import captured_decode, captured_prefill
from benchmarks.steps.encoder import fitting_bucket, pictures, video
from benchmarks.steps.full_size import captured, load
from benchmarks.steps.speech import captured_decode as captured_speech
from models.checkpoints.registry import family_of, resolve
from service.engine.start import engine_stream
from service.graphs.pool import GraphPool

SPEECH = "voxcpm2"
DECODE_ROWS: dict[str, tuple[int, ...]] = {"qwen2_vl_2b": (1, 32, 128), "kimi_vl_a3b": (1, 8, 128)}
PREFILLS = {
    "qwen2_vl_2b": (384, 1024, 2048),
    "qwen2_5_vl_3b": (384, 1024),
    "qwen3_vl_4b": (384, 1024),
    "kimi_vl_a3b": (384, 1024),
}
ENCODED = {
    "qwen2_vl_2b": (pictures(448, 448), pictures(1024, 1024), video(16, 448, 448)),
    "qwen2_5_vl_3b": (pictures(448, 448), pictures(640, 480), pictures(1024, 1024)),
}
STREAMS = (1, 32, 64)
TOGETHER = ("qwen2_vl_2b", "qwen2_5_vl_3b", "qwen3_vl_4b", SPEECH)
"""Models that fit on one GPU twice."""
REPEATS = 60
POOL_BYTES = 24 << 30

Step = Callable[[], object]


def steps(names: Sequence[str], folder: Path, device: torch.device) -> Iterator[tuple[str, Step, Step]]:
    """Name, what sets the step's state back, and the step itself, captured."""
    for name in names:
        yield from (speech_steps if name == SPEECH else chat_steps)(name, make(name, folder), device)


def speech_steps(name: str, directory: Path, device: torch.device) -> Iterator[tuple[str, Step, Step]]:
    speech = load(directory, device)
    for streams in STREAMS:
        runner, plan, tables = captured_speech(speech, streams, GraphPool(device, POOL_BYTES))
        length = tables["length"]
        yield f"decode {name}, {streams} streams", partial(length.copy_, length.clone()), partial(runner.run, plan)


def chat_steps(name: str, directory: Path, device: torch.device) -> Iterator[tuple[str, Step, Step]]:
    processor, model = resolve(family_of(directory).processor)(directory), load(directory, device)
    for rows in DECODE_ROWS.get(name, ()):
        runner, plan, state = captured_decode(name, model.decoder, rows, GraphPool(device, POOL_BYTES))
        restore = partial(state.ints.copy_, state.ints.clone())
        yield f"decode {name}, {rows} rows", restore, partial(runner.run, plan)
    for tokens in PREFILLS[name]:
        runner, plan = captured_prefill(name, model.decoder, tokens, GraphPool(device, POOL_BYTES))
        yield f"prefill {name}, {tokens} tokens", lambda: None, partial(runner.run, plan)
    pool = GraphPool(device, POOL_BYTES)
    for label, build in ENCODED.get(name, ()):
        plan = model.encoder.plan(build(processor))
        bucket = fitting_bucket(model.encoder.default_buckets(), plan)
        runner = captured(name, "encoder", model.encoder, [bucket], pool)
        yield f"encoder {name}, {label}", lambda: None, partial(runner.run, plan)


@torch.inference_mode()
def serve(names: Sequence[str] = TOGETHER) -> None:
    """A checkout's end: says "ready", then answers every line with the medians of a round."""
    device = torch.device("cuda", 0)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    sys.stdout = sys.stderr
    with tempfile.TemporaryDirectory() as folder, engine_stream(device):
        made = list(steps(names, Path(folder), device))
        print("ready", file=answers)
        for _ in sys.stdin:
            found = {}
            for name, restore, step in made:
                restore()
                found[name] = milliseconds(step, repeats=REPEATS, warm_up=10)["median"]
            print(json.dumps(found), file=answers)


def started(checkout: Path, models: Sequence[str]) -> subprocess.Popen[str]:
    given = repr(list(models)) if models else ""
    command = [sys.executable, "-c", f"from benchmarks.versions import serve; serve({given})"]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join((".", os.environ.get("PYTHONPATH", "")))}
    return subprocess.Popen(
        command, cwd=checkout, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )


def said(stream: IO[str] | None) -> str:
    assert stream is not None
    line = stream.readline()
    assert line, "a checkout's process ended"
    return line


def main() -> None:
    parser = command_line("benchmarks.versions", __doc__)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--models", nargs="+", choices=[*PREFILLS, SPEECH], default=[])
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    both = [started(checkout, arguments.models) for checkout in (arguments.old, arguments.new)]
    for process in both:
        assert said(process.stdout) == "ready\n"
    rounds: list[list[dict[str, float]]] = [[], []]
    for _ in range(arguments.rounds):
        for process, found in zip(both, rounds, strict=True):
            assert process.stdin is not None
            process.stdin.write("round\n")
            found.append(json.loads(said(process.stdout)))
    for process in both:
        process.kill()
    rows = []
    for name in rounds[0][0]:
        old, new = (statistics.median(found[name] for found in side) for side in rounds)
        each = {side: [found[name] for found in made] for side, made in zip(("old", "new"), rounds, strict=True)}
        rows.append({"step": name, "old_ms": old, "new_ms": new, "ratio": new / old, "rounds": each})
        print(f"{name:32} {old:8.4f} {new:8.4f} {new / old:7.4f}")
    write("_".join(("versions", *arguments.models)), rows, rounds=arguments.rounds)


if __name__ == "__main__":
    main()
