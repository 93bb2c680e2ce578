"""Drafts of a model's own drafter, with random weights and acceptance as drawn here: a replayed step with three drafts
beside one without, and milliseconds a token through the engine's loop.

    python -m benchmarks.drafts qwen3_5_4b [--many 64] [--tiny]

A draft is accepted with probability 0.8, 0.7 and 0.6 where those before it were (2.7 tokens a step), whatever it is;
whether a step has drafts is the engine's own choice. --many: also with so many answers at once. --tiny takes a
miniature on the CPU, to try the script.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.checkpoints.published import GOLDEN
from benchmarks.checkpoints.served import served_directory
from benchmarks.measure.command_line import command_line
from benchmarks.measure.record import Row, record
from benchmarks.measure.timing import milliseconds, spread
from benchmarks.steps.decoder import POOL_BYTES, captured_decode, fill
from benchmarks.steps.full_size import free
from models.checkpoints.registry import family_of, resolve
from models.interfaces.media import Prompt
from service.engine.chat import steps
from service.engine.chat.slot_state import IntColumn, SlotState
from service.engine.chat.worker import ChatWorker
from service.engine.core.pages import pages_for
from service.engine.core.worker import WorkerContext
from service.engine.engine import Engine
from service.engine.memory import total_memory
from service.engine.start import engine_stream
from service.graphs.observations import Observations
from service.graphs.pool import GraphPool, claim_workspace
from service.link.config import EngineConfig
from service.link.messages import ChatRequest, Command, Outputs
from service.link.sampling import SamplingParams

RATES = (0.8, 0.7, 0.6)
PROMPT, ANSWER, MANY_ANSWER, ROUNDS = 256, 512, 320, 2


def drawn_accept(real: Callable[..., Any]) -> Callable[..., Any]:
    """service.engine.chat.drafts.accept of drafts that are right at RATES, by a hash of slot, position and draft."""

    def accept(sampled: Tensor, drafts: Tensor, slots: Tensor, state: SlotState, *, full: bool) -> Any:
        places = torch.arange(drafts.shape[1], device=slots.device)
        mixed = (state.ints[slots, IntColumn.LENGTH, None] * 8 + places) * 0x9E3779B97F4A7C1
        mixed = mixed + slots[:, None] * 0xBF58476D1CE4E5
        for _ in range(2):
            mixed = (mixed ^ (mixed >> 29)) * 0x4F58476D1CE4E5B9
        drawn = ((mixed >> 20) & 0xFFFFF) / (1 << 20)
        right = torch.stack([drawn[:, place] < rate for place, rate in enumerate(RATES)], dim=1)
        tokens = sampled[:, :-1, 0]
        return real(
            sampled, torch.where(drafts < 0, drafts, torch.where(right, tokens, tokens + 1)), slots, state, full=full
        )

    return accept


@dataclass
class Kept:
    """A channel whose commands wait in a list, and whose outputs are kept with the time when they came."""

    commands: list[Command] = field(default_factory=list)
    outputs: list[tuple[float, Outputs]] = field(default_factory=list)

    def receive(self, timeout: float | None) -> list[Command]:
        commands, self.commands = self.commands, []
        return commands

    def send(self, outputs: Outputs) -> None:
        self.outputs.append((time.perf_counter(), outputs))


class Served:
    """An engine of one loaded model, with the graphs of greedy decoding."""

    def __init__(self, directory: Path, model: Any, drafter: Any, rows: Sequence[int], device: torch.device) -> None:
        """drafter: Decoder.drafter in this engine; None: no drafts."""
        self.decoder, self.drafter, self.channel, self.count = model.decoder, drafter, Kept(), 0
        self.decoder.drafter = drafter
        config = EngineConfig(
            models=(),
            drafts="off" if drafter is None else "mtp",
            max_running=max(rows),
            decode_buckets=tuple(rows),
            gpu_bytes=total_memory(device),
            itl_target=None,
        )
        observations, pool = Observations(), GraphPool(device, POOL_BYTES)
        context = WorkerContext(config, device, torch.bfloat16, pool, observations, time.monotonic)
        worker = ChatWorker("it", resolve(family_of(directory).processor)(directory), model, context)
        worker.allocate(2 + max(rows) * pages_for(PROMPT + ANSWER + 16, config.page_size))
        graphs = worker._runner.graphs
        for runner in (graphs.decode[False], graphs.verify[False], graphs.sample[False]):
            while runner.capture_next(idle=False):
                pass
        worker.calibrate()
        self.engine = Engine([worker], pool, observations, self.channel, overlapped=device.type == "cuda")

    def answer(self, rows: int, tokens: int) -> Row:
        """Milliseconds a token of each of `rows` answers, while all of them are written."""
        self.decoder.drafter = self.drafter
        self.count += 1
        random = np.random.default_rng(self.count)
        self.channel.outputs.clear()
        for row in range(rows):
            ids = random.integers(1, 300, PROMPT).astype(np.int32)
            prompt = Prompt(ids, np.tile(np.arange(PROMPT, dtype=np.int32), (3, 1)), PROMPT, (), ())
            sampling = SamplingParams(max_tokens=tokens, temperature=0.0)
            asked = ChatRequest(f"{self.count} {row}", "it", prompt, sampling, time.monotonic())
            self.channel.commands.append(asked)
        ended = 0
        while ended < rows:
            seen = len(self.channel.outputs)
            self.engine.turn()
            for _, outputs in self.channel.outputs[seen:]:
                assert not outputs.failed, outputs.failed
                ended += sum(delta.finish_reason is not None for delta in outputs.chat)
        return self._row(rows)

    def _row(self, rows: int) -> Row:
        deltas = [(at, delta) for at, outputs in self.channel.outputs for delta in outputs.chat if delta.token_ids]
        firsts = {delta.request_id: at for at, delta in reversed(deltas)}
        begin, end = max(firsts.values()), min(at for at, delta in deltas if delta.finish_reason is not None)
        within = sum(len(delta.token_ids) for at, delta in deltas if begin < at <= end)
        counts = {"decode": 0, "verify": 0}
        for at, outputs in self.channel.outputs:
            for event in outputs.observations:
                if begin < at <= end and event.name == "steps_total" and event.labels["kind"] in counts:
                    counts[event.labels["kind"]] += int(event.value)
        return {
            "ms_per_token": 1e3 * (end - begin) * rows / within,
            "ms_per_step": 1e3 * (end - begin) / sum(counts.values()),
            "plain_steps": counts["decode"],
            "verify_steps": counts["verify"],
        }


def step_rows(name: str, decoder: Any, drafter: Any, device: torch.device) -> Iterator[Row]:
    """A replayed step of one row without drafts, and with three."""
    plain = 0.0
    for drafts in (0, len(RATES)):
        decoder.drafter = drafter if drafts else None
        runner, plan, state = captured_decode(name, decoder, 1, GraphPool(device, POOL_BYTES), drafts)
        fill(state, 1)
        found = spread("replay", milliseconds(partial(runner.run, plan), repeats=80))
        plain = plain or found["replay_ms"]
        yield {"what": "step", "at_once": 1, "drafts": drafts, **found, "over_plain": found["replay_ms"] / plain}
        free()


@torch.inference_mode()
def measured(name: str, many: int, tiny: bool) -> Iterator[tuple[Row, dict[str, Any]]]:
    device = torch.device("cpu") if tiny else torch.device("cuda", 0)
    facts = {"model": name, "acceptance": RATES}
    with tempfile.TemporaryDirectory() as folder, engine_stream(device):
        claim_workspace(device)
        directory = GOLDEN / "qwen3_5" if tiny else served_directory(name, Path(folder))
        model = resolve(family_of(directory).model)(directory, device, torch.bfloat16, "random", drafter=True)
        drafter = model.decoder.drafter
        for found in step_rows(name, model.decoder, drafter, device):
            yield found, facts
        sizes = sorted({1, many or 1})
        engines = {drafts: Served(directory, model, made, sizes, device) for drafts, made in ((0, None), (3, drafter))}
        for rows in sizes:
            for number in range(ROUNDS + 1):
                for drafts, engine in engines.items():
                    found = engine.answer(rows, 32 if tiny else ANSWER if rows == 1 else MANY_ANSWER)
                    if number:  # The first one compiles.
                        yield {"what": "engine", "at_once": rows, "drafts": drafts, "round": number, **found}, facts


def main(words: Sequence[str] | None = None) -> Path:
    parser = command_line("benchmarks.drafts", __doc__)
    parser.add_argument("model")
    parser.add_argument("--many", type=int, default=0)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args(words)
    steps.accept = drawn_accept(steps.accept)
    return record(f"drafts_{given.model}{'_tiny' * given.tiny}", measured(given.model, given.many, given.tiny))


if __name__ == "__main__":
    main()
