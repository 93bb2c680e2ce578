"""A replay in a bucket that the call fills gives the bits of the eager call: its outputs, and all state it writes.

Every call of a runner in an engine that answers the golden prompts is made three more times, once for each kind and
size: captured in a bucket of exactly its size, replayed and eager, each on the state that the call found.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.checkpoints.registry import family_of, resolve
from models.interfaces.capturable import Bucket, Plan
from models.voxcpm2.model import load_model
from service.engine.chat.graphs import ChatGraphs
from service.engine.start import engine_stream
from service.graphs.observations import Observations
from service.graphs.pool import GraphPool
from service.graphs.runner import GraphRunner, Run
from tests.engine.speech.rig import WorkerRig
from tests.engine.speech.test_worker import streams
from tests.models.voxcpm2 import golden
from tests.support.chat_golden import golden_prompt
from tests.support.golden import GOLDEN, is_chat, prompts
from tests.support.inference import no_gradients as no_gradients
from tests.support.inline_engine import InlineEngine

SCRATCH = 1
"""KV slots that several rows of padding write at once."""
MOST = 3
"""Sizes of a kind in an engine."""
CHAT = sorted(path.parent.name for path in GOLDEN.glob("*/config.json") if is_chat(family_of(path.parent)))
HERE = [pytest.param("cpu", "qwen2_vl"), *(pytest.param("cuda", name, marks=pytest.mark.gpu) for name in CHAT)]


class Compared:
    """Stands in for GraphRunner.run, and compares the routes of the calls that it sees."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._run = GraphRunner.run
        self._seen: set[tuple[str, tuple[tuple[str, int], ...]]] = set()
        self.kinds: Counter[str] = Counter()
        self.differences: dict[str, list[str]] = {}
        """By kind: the size, what differs, and by how much."""

    def run(self, runner: GraphRunner, plan: Plan, **options: Any) -> Run:
        kind = runner._labels["kind"]
        key = kind, tuple(sorted(plan.required.items()))
        if key not in self._seen and self.kinds[kind] < MOST:
            self._seen.add(key)
            self.kinds[kind] += 1
            self._compare(runner, kind, plan)
        return self._run(runner, plan, **options)

    def _compare(self, runner: GraphRunner, kind: str, plan: Plan) -> None:
        self._wait()
        state = dict(held(runner.capturable))
        found = {name: value.clone() for name, value in state.items()}
        bucket = dict(plan.required)
        if "levels" in bucket and (graph := runner.graph_for(plan.required)) is not None:
            # Text in a graph with features has rows as wide as that wants.
            bucket["levels"] = graph.bucket["levels"]
        plan = replace(plan, required=bucket)
        pool, fill_others = GraphPool(self._device, 8 << 30), runner._fill_others
        own = GraphRunner("test", kind, runner.capturable, [bucket], pool, Observations(), fill_others=fill_others)
        while own.capture_next(idle=False):
            pass
        assert own.captured == [bucket], f"{kind} was not captured for {bucket}"
        made = []
        for route in ("replay", "eager"):
            for name, value in found.items():
                state[name].copy_(value)
            run = self._run(own, plan, **({} if route == "replay" else {"eager": "disabled"}))
            assert run.route == route
            outputs = {f"output {name}": value.clone() for name, value in run.outputs.items()}
            made.append(
                outputs | {name: value[SCRATCH if ".caches." in name else 0 :].clone() for name, value in state.items()}
            )
        for name, value in found.items():
            state[name].copy_(value)
        self._wait()
        replayed, eager = made
        for name, value in replayed.items():
            if not same_bits(value, eager[name]):
                difference = (value.double() - eager[name].double()).abs().nan_to_num().max()
                self.differences.setdefault(kind, []).append(f"{bucket} {name} by {float(difference):.2g}")

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def check(self, model: str, wanted: set[str]) -> None:
        """All differences together, and that steps of every kind of `wanted` were compared."""
        found = [f"{kind}: {line}" for kind, lines in self.differences.items() for line in lines]
        assert not found, "\n".join([model, *found])
        assert wanted <= set(self.kinds), self.kinds


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Scratch may hold NaN."""
    return a.shape == b.shape and torch.equal(
        a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8)
    )


def held(one: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Tensors that a step holds beside the parameters of its networks: caches and slot state."""
    if isinstance(one, Tensor):
        yield path, one
    elif isinstance(one, Mapping):
        for name, value in one.items():
            yield from held(value, f"{path}.{name}")
    elif isinstance(one, list | tuple):
        for index, value in enumerate(one):
            yield from held(value, f"{path}.{index}")
    elif not isinstance(one, nn.Module) and type(one).__module__.partition(".")[0] in ("service", "models"):
        for name, value in getattr(one, "__dict__", {}).items():
            yield from held(value, f"{path}.{name}")


def first_captured(graphs: ChatGraphs, required: Bucket, *, cached_context: bool) -> GraphRunner | None:
    """Without cached context where it can be, whatever was measured."""
    runners = [graphs.cached_prefill] if cached_context else [graphs.prefill, graphs.cached_prefill]
    return next((one for one in runners if one.graph_for(required) is not None), None)


def watched(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> Compared:
    compared = Compared(device)
    monkeypatch.setattr(GraphRunner, "run", lambda runner, plan, **options: compared.run(runner, plan, **options))
    return compared


@pytest.mark.parametrize("device, name", HERE)
def test_replays_of_chat_give_the_bits_of_eager_calls(device: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One prompt after the other and all together, in chunks that fit captured prefills; greedily and with log
    probabilities."""
    directory, where = GOLDEN / name, torch.device(device)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    processor = resolve(family_of(directory).processor)(directory)
    compared = watched(where, monkeypatch)
    monkeypatch.setattr(ChatGraphs, "prefill_for", first_captured)
    with engine_stream(where):
        model = resolve(family_of(directory).model)(directory, where, dtype)
        for step_tokens in (64, 37):
            compared.kinds.clear()
            engine = InlineEngine(
                model,
                processor,
                device=device,
                dtype=dtype,
                num_pages=256,
                max_step_tokens=step_tokens,
                overlapped=False,
            )
            for number, prompt in enumerate(prompts(directory)):
                options = {"logprobs": 2} if number % 2 else {}
                engine.submit(prompt, golden_prompt(processor, directory, prompt), max_tokens=4, **options)
                if step_tokens == 64:
                    engine.run()
            engine.run()
            assert not engine.failures()
            wanted = {"encoder", "prefill", "decode"} if step_tokens == 64 else {"encoder", "cached_prefill"}
            compared.check(name, wanted)


@pytest.mark.parametrize("device", [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)])
def test_replays_of_speech_give_the_bits_of_eager_calls(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    where = torch.device(device)
    with engine_stream(where):
        model = load_model(golden.DIRECTORY, where, torch.bfloat16 if device == "cuda" else torch.float32)
        model.network.stop_head.weight.data.zero_()
        rig = WorkerRig(model, max_running=4, buckets=(1, 4), tokens=8192, device=device, capture_all=True)
        # Not before: the prefills whose costs are measured write all keys to one place.
        compared = watched(where, monkeypatch)
        rig.run({0: streams(3), 2: streams(4)[3:]})
    compared.check("voxcpm2", {"prefill", "tail", "decode", "vae"})
