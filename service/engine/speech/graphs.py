"""The captured graphs of a speech model: a runner for each step, its buckets, and which of these are captured before
readiness."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil

import numpy as np
import torch
from torch import Tensor

from models.interfaces.capturable import Bucket, Capturable, Plan
from models.layers.adapters import LoraBank
from models.layers.lora import rows_arrays
from models.protocol import SpeechModel
from service.engine.core.worker import WorkerContext
from service.graphs.buckets import spanning
from service.graphs.runner import GraphRunner

_PREFILL_TOKENS = {"cuda": (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024), "cpu": (64,)}
"""Buckets of captured prefills, each for text alone, for few patches (what is left of a voice's reference behind its
shared pages) and for as many patches as tokens. Up to about a thousand tokens, an eager prefill is bound by kernel
launches, not by the GPU."""
_PATCHES_PER_TOKEN = (0.0, 0.25, 1.0)
"""In buckets for text alone, for few patches and for many."""
_PREFILLS_BEFORE_READY = {"cuda": ((64, 128, 256, 1024), (64, 256, 1024), (256, 1024)), "cpu": ((64,), (64,), (64,))}
"""Tokens of the buckets that are captured before readiness: for text alone, with few patches, and with many."""
_PREFILL_SEQUENCES = 16
_RARE_STRIDE = 4
"""For numbers of solver steps other than the default, the bucket list holds only every fourth batch size, captured once
a request has named them: their parts take 0.2 s each."""


class SpeechGraphs:
    """The graph runners of one model, except for the codec's: with a bank for rows that may have adapters, without one
    for rows that have none.

    decode, tail: by number of solver steps. prefill: prompt chunks, with cached context or without.
    """

    def __init__(
        self,
        name: str,
        model: SpeechModel,
        context: WorkerContext,
        state: Mapping[str, Tensor],
        caches: Sequence[Mapping[str, Tensor]],
        buckets: Sequence[int],
        solver_steps: Sequence[int],
        *,
        bank: LoraBank | None = None,
    ) -> None:
        """bank: the adapters' slots; None: rows have no adapters, and no cost for them."""
        self._bank = bank
        page_size = context.config.page_size
        rows = [{"rows": bucket} for bucket in buckets]
        default, rare = solver_steps[0], rows[::-_RARE_STRIDE]

        def by_solver_steps(kind: str, step: Callable[[int], Capturable]) -> dict[int, GraphRunner]:
            return {
                count: make_runner(name, kind, step(count), rows, context)
                if count == default
                else make_runner(name, kind, step(count), rare, context, (), on_demand=rare)
                for count in solver_steps
            }

        self.decode = by_solver_steps("decode", lambda count: model.decode_step(count, state, caches, page_size, bank))
        self.tail = by_solver_steps("tail", lambda count: model.tail(count, state, bank))
        device = "cpu" if context.device.type == "cpu" else "cuda"
        bucket_list, before_ready = prefill_buckets(device, context.config.max_step_tokens)
        prefill = model.prefill_step(state, caches, page_size, bank)
        self.prefill = make_runner(name, "prefill", prefill, bucket_list, context, before_ready)

    @property
    def others(self) -> list[GraphRunner]:
        """Those beside the decode steps."""
        return [*self.tail.values(), self.prefill]

    def plan(self, slots: np.ndarray, adapters: np.ndarray) -> Plan:
        """Inputs of a step over rows with these request slots and adapters' slots, which rise."""
        assert (np.diff(adapters) >= 0).all(), adapters
        arrays = {"slots": slots} | self.lora_arrays(adapters)
        return Plan(arrays=arrays, required={"rows": len(slots)}, fills={"lora_slots": -1})

    def lora_arrays(self, adapters: np.ndarray) -> dict[str, np.ndarray]:
        """Inputs for rows or prompt positions with these adapters' slots, -1 for none."""
        if self._bank is None:
            return {}
        return {f"lora_{name}": array for name, array in rows_arrays(adapters, self._bank.num_slots).items()}


def make_runner(
    name: str,
    kind: str,
    capturable: Capturable,
    bucket_list: Sequence[Bucket],
    context: WorkerContext,
    before_ready: Sequence[Bucket] | None = None,
    capture_stream: Callable[[Bucket], torch.cuda.Stream | None] = lambda bucket: None,
    *,
    on_demand: Sequence[Bucket] = (),
) -> GraphRunner:
    """before_ready: to capture before readiness, by default all. After a restart these are a few that hold all others,
    since a step in a larger bucket keeps the pace of playback, and an eager one does not."""
    first = bucket_list if before_ready is None else before_ready
    return GraphRunner(
        name,
        kind,
        capturable,
        bucket_list,
        context.pool,
        context.observations,
        enabled=context.config.graphs,
        on_demand=on_demand,
        before_ready=spanning(first) if context.config.restarted else first,
        capture_stream=capture_stream,
    )


def prefill_buckets(device: str, most: int) -> tuple[list[Bucket], list[Bucket]]:
    """Buckets of captured prefills of at most `most` tokens, and those to capture before readiness."""

    def buckets(tokens: Sequence[int], patches: float) -> list[Bucket]:
        sizes = sorted({min(size, most) for size in tokens})
        return [{"tokens": n, "audio": ceil(n * patches), "sequences": min(n, _PREFILL_SEQUENCES)} for n in sizes]

    bucket_list = [bucket for patches in _PATCHES_PER_TOKEN for bucket in buckets(_PREFILL_TOKENS[device], patches)]
    before_ready = zip(_PREFILLS_BEFORE_READY[device], _PATCHES_PER_TOKEN, strict=True)
    return bucket_list, [bucket for tokens, patches in before_ready for bucket in buckets(tokens, patches)]
