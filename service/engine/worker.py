"""Between the engine loop and a hosted model: what the loop asks of each model's worker.

The loop (engine.py) owns the GPU and the order of launches; a worker owns its requests, slots, pages and recordings.
Everything runs in one thread and on one CUDA stream, so what is launched later runs later: pages and slots that are
freed after a launch can be given away at once. `tick` launches and never waits; results are copied to pinned memory
behind the launch and read by `collect` when their event has fired, as a rule one step later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from service.engine.config import EngineConfig
from service.engine.messages import (
    Abort,
    ChatRequest,
    EncodeReference,
    ModelState,
    Outputs,
    Pause,
    SpeechAppend,
    SpeechRequest,
)
from service.graphs.accounting import Observations
from service.graphs.pool import GraphPool
from service.graphs.runner import GraphRunner

QUEUE_RETRY_AFTER = 5.0
"""Seconds; said to a client whose request waited in vain."""
WARM_TOKENS = 512
WARM_SEQUENCES = 32
"""An eager prefill of more tokens or sequences needs the same kernels as one of so many."""

Request = ChatRequest | SpeechRequest | EncodeReference
Control = SpeechAppend | Abort | Pause


@dataclass(frozen=True)
class MemoryNeeds:
    """Bytes that a worker will want beside its weights and pages, measured by running its largest admitted shapes.

    workspace: peak of one eager run; graphs: pool of its largest recording. Both are shared between workers, since
    one runs at a time. state: slot state and static buffers, which are its own.
    """

    workspace: int = 0
    graphs: int = 0
    state: int = 0


@dataclass(frozen=True)
class WorkerContext:
    """What all workers of an engine share."""

    config: EngineConfig
    device: torch.device
    dtype: torch.dtype
    """Of this worker's weights and caches."""
    pool: GraphPool
    observations: Observations
    """Metric events; the loop sends and clears them."""
    clock: Callable[[], float]
    """time.monotonic, or a test's own."""


class ModelWorker(Protocol):
    """One hosted model. Made by create_worker(name, processor, model, context) of its kind's module."""

    name: str
    """The model name that requests carry."""
    page_bytes: int
    """One page of all layers."""
    max_pages: int
    """More pages than this it cannot use."""
    min_pages: int
    """With fewer the engine does not start: too few for one request of its context, or of a length still useful."""

    # Start: measure, allocate, capture_next until it returns False, warm_up.

    def measure(self) -> MemoryNeeds:
        """Runs the largest admitted shapes once."""
        ...

    def allocate(self, num_pages: int) -> None:
        """Allocates caches of `num_pages` pages (the scratch page among them) and slot state."""
        ...

    @property
    def graph_runners(self) -> Sequence[GraphRunner]:
        """All of its captured computations, once `allocate` has run."""
        ...

    def capture_next(self, *, idle: bool) -> bool:
        """Makes one recording that is wanted, with nothing in flight; False when none is.

        idle False: before readiness, only those without which the first requests would be slow. idle True: the rest
        of the ladder and what demand has shown.
        """
        ...

    def warm_up(self) -> None:
        """Runs once what may later run without a recording, at every size at which a kernel is another one: after it no
        kernel is compiled. Called on a GPU, with nothing in flight; state and pages are as before."""
        ...

    # Commands. None of these raises for what a client sent: a bad request ends as Failed in collect's Outputs.

    def submit(self, request: Request) -> None: ...

    def control(self, command: Control) -> None:
        """Ids of other workers or of finished requests are ignored."""
        ...

    def end_waits(self, now: float) -> None:
        """Fails requests that have had no step for the queue timeout. Called once per heartbeat."""
        ...

    # Stepping.

    def has_work(self) -> bool:
        """Something could be launched now (at most two launches are in flight)."""
        ...

    def slack(self, now: float) -> float:
        """Seconds until a step must be launched, lest a live listener's audio runs out; its own cost and that of
        delivery are taken off. Infinity when nobody listens live."""
        ...

    def backlog(self, now: float) -> float:
        """Predicted seconds of launched work that has not finished."""
        ...

    def least(self) -> float:
        """Predicted seconds of the smallest unit of work, which `must` launches."""
        ...

    def tick(self, now: float, allowance: float, *, must: bool = False) -> bool:
        """Launches as much of its work as is predicted to take at most `allowance` seconds in one go.

        Returns False when nothing that fits could be launched. must: when nothing fits, the smallest unit of work is
        launched all the same.
        A launch that fails (also for lack of memory) fails its own requests and no other.
        """
        ...

    def oldest_launch(self) -> float | None:
        """When the oldest launch whose results were not collected was made; None without one."""
        ...

    def wait(self) -> None:
        """Blocks until the results of the oldest launch have arrived."""
        ...

    def collect(self) -> Outputs:
        """What arrived since the last call, failures of submit included (without state and observations)."""
        ...

    def state(self) -> ModelState: ...
