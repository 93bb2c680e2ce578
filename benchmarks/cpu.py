"""Whether work on the CPU became slower: ratios of fixed workloads to a fixed reference, all interleaved in one run.

    python -m benchmarks.cpu           # fails when a ratio is more than 1.5 times the committed one
    python -m benchmarks.cpu --write   # commits new ratios to benchmarks/results/cpu_baseline.json

Absolute times are not compared. The reference is half interpreter, half small operations of torch, as the workloads
are; each time is the thread's own on a processor and the least of many short rounds, so that a busy machine changes
little.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from benchmarks.measure.command_line import command_line
from benchmarks.measure.record import RESULTS, table, write
from benchmarks.steps.encoder import pictures
from benchmarks.steps.full_size import captured
from benchmarks.steps.speech import live_state
from models.checkpoints.registry import family_of, resolve
from models.interfaces.capturable import Plan
from models.protocol import ChatModel, SpeechModel
from models.text.processor import ChatProcessor
from service.api.chat.detokenizer import TextAssembler
from service.api.chat.schema import ChatCompletionChunk, ChunkChoice, DeltaMessage
from service.api.http.streaming import event
from service.engine.core.pages import pages_for
from service.graphs.pool import GraphPool
from service.link import wire
from service.link.messages import ChatDelta, Outputs
from tests.support.inline_engine import InlineEngine
from tests.support.miniature import talker
from tests.support.tiny_chat import tiny_prompt

EMBEDDED = Path(__file__).parents[1] / "models/embedded"
NAME = "cpu_baseline"
ROUNDS = 100
LIMIT = 1.5
CPU = torch.device("cpu")
ROWS = 64

Workload = Callable[[], object]


def reference() -> None:
    """About a millisecond, half of it in the interpreter. Never change it: the committed ratios are ratios to it."""
    counts: dict[int, int] = {}
    for index in range(3500):
        key = (index * 7919) % 257
        counts[key] = counts.get(key, 0) + len((index, key))
    a = torch.ones(64, 64)
    for _ in range(40):
        a = (a @ a).mul_(1 / 64).add_(1e-3)


class _NothingCaptured:
    """A graph that costs nothing to replay, so that a step is the engine's own Python."""

    def __init__(self, outputs: Mapping[str, Tensor]) -> None:
        self.outputs = {name: torch.ones_like(value) for name, value in outputs.items()}
        self.outputs["results"][:, 1] = 0

    def replay(self) -> None:
        return


def chat_step() -> Workload:
    """Scheduling, launch and results of a decode step of 64 rows, without a model."""

    engine = InlineEngine(num_pages=ROWS * 20 + 1, max_running=ROWS, max_step_tokens=4096, page_size=16, poisoned=False)
    for row in range(ROWS):
        engine.submit(str(row), tiny_prompt([[row % 50 + 1] * 20]), max_tokens=2 * ROUNDS)
    outputs = engine.channel.outputs
    while not outputs or len(outputs[-1].chat) < ROWS:  # prompts end in different steps
        engine.turn()
    for bucket in engine.worker._runner.graphs.decode[False]._graphs.values():
        bucket.static.fill(bucket.layout, Plan(arrays={}, required=bucket.bucket))
        bucket.capture.replay()  # which makes the outputs
        object.__setattr__(bucket, "capture", _NothingCaptured(bucket.capture.outputs))

    def step() -> None:
        sent = len(outputs)
        while len(outputs) == sent or not outputs[-1].chat:
            engine.turn()
        assert len(outputs[-1].chat) == ROWS, "one message a step"

    return step


def tokens_to_client() -> Workload:
    """64 rows' tokens over the wire between the processes, then to text and to server-sent events."""
    processor = _chat()[0]
    assemblers = [TextAssembler(processor.detokenize, ["never said"]) for _ in range(ROWS)]

    decoder: wire.MessageDecoder[Outputs] = wire.MessageDecoder(Outputs)

    def deliver() -> None:
        deltas = tuple(ChatDelta(str(row), (300 + row,)) for row in range(ROWS))
        received = decoder.decode([bytes(frame) for frame in wire.encode(Outputs(chat=deltas))])
        for delta, assembler in zip(received.chat, assemblers, strict=True):
            text = assembler.feed(delta).content
            event(ChatCompletionChunk("id", 0, "model", [ChunkChoice(0, DeltaMessage(content=text))]))

    return deliver


def packing() -> Workload:
    """Twelve pictures into one encoder pass."""
    processor, model = _chat()
    items = pictures(56, 56, 12)[1](processor)
    return lambda: model.encoder.plan(items)


def encoder() -> Workload:
    """A replayed encoder pass of the embedded Qwen2-VL."""
    processor, model = _chat()
    plan = model.encoder.plan(pictures(56, 56, 2)[1](processor))
    replayed = captured("cpu", "encoder", model.encoder, [plan.required], GraphPool(CPU, 1 << 30))
    return lambda: replayed.run(plan)


def speech_step() -> Workload:
    """A step of a miniature VoxCPM2 for one stream, codec inside: most of it is the way, not the arithmetic."""
    directory = talker()
    model: SpeechModel = resolve(family_of(directory).model)(directory, CPU, torch.float32)
    streams, page_size = 1, 16
    state = live_state(model, streams, CPU)
    pages = 1 + streams * pages_for(model.max_positions, page_size)
    caches = [spec.allocate(pages, page_size, CPU, torch.float32) for spec in model.cache_specs()]
    pool = GraphPool(CPU, 1 << 30)
    plan = Plan(arrays={"slots": np.arange(1, streams + 1, dtype=np.int64)}, required={"rows": streams})
    decode = captured("cpu", "decode", model.decode_step(4, state, caches, page_size), [plan.required], pool)
    codec = captured("cpu", "vae", model.vae_step(state), [plan.required], pool)

    def step() -> None:
        state["length"].fill_(256)
        codec.run(replace(plan, tensors={"results": [decode.run(plan).outputs["results"]]}))

    return step


def _chat() -> tuple[ChatProcessor, ChatModel]:
    directory = EMBEDDED / "qwen2_vl"
    family = family_of(directory)
    return resolve(family.processor)(directory), resolve(family.model)(directory, CPU, torch.float32)


WORKLOADS: dict[str, Callable[[], Workload]] = {
    made.__name__: made for made in (chat_step, tokens_to_client, packing, encoder, speech_step)
}


def ratios(workloads: Mapping[str, Workload], rounds: int = ROUNDS) -> dict[str, float]:
    """Least processor time of each over the least of the reference, all of them once in each round."""
    best: dict[str, float] = {}
    with torch.inference_mode():
        for call in workloads.values():
            call()
        for _ in range(rounds):
            for name, call in {"reference": reference, **workloads}.items():
                began = time.thread_time()
                call()
                best[name] = min(best.get(name, float("inf")), time.thread_time() - began)
    return {name: best[name] / best["reference"] for name in workloads}


def slower(measured: Mapping[str, float], baseline: Mapping[str, float]) -> dict[str, float]:
    """By how much those became slower that did so by more than LIMIT."""
    changes = {name: ratio / baseline[name] for name, ratio in measured.items()}
    return {name: change for name, change in changes.items() if change > LIMIT}


def committed() -> dict[str, float]:
    rows = json.loads((RESULTS / f"{NAME}.json").read_text())["rows"]
    return {row["workload"]: row["ratio"] for row in rows}


def build() -> dict[str, Workload]:
    """One thread, so that a second core that is busy or not makes no difference."""
    torch.set_num_threads(1)
    with torch.inference_mode():
        return {name: make() for name, make in WORKLOADS.items()}


def main(words: Sequence[str] | None = None) -> None:
    parser = command_line("benchmarks.cpu", __doc__)
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args(words)
    measured = ratios(build())
    if arguments.write:
        write(NAME, [{"workload": name, "ratio": ratio} for name, ratio in measured.items()], rounds=ROUNDS)
        return
    baseline = committed()
    print(table([{"workload": n, "ratio": r, "committed": baseline[n]} for n, r in measured.items()]))
    if found := slower(measured, baseline):
        sys.exit(f"slower than {LIMIT} times: {found}")


if __name__ == "__main__":
    main()
