"""The interface between the engine loop and the worker of a hosted model.

The loop (engine.py) owns the GPU and the order of launches; a worker owns its requests, slots, pages and captured
graphs. One thread launches everything, and everything that uses slots or pages runs on one CUDA stream in the order of
launches, so pages and slots that are freed after a launch can be given away at once. `tick` launches and never waits;
results are copied to pinned memory after the launch and read by `collect` when their event has fired, usually one step
later.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch

from service.graphs.observations import Observations
from service.graphs.pool import GraphPool
from service.graphs.runner import GraphRunner
from service.link.config import EngineConfig
from service.link.messages import Control, ModelState, Outputs, Request


class StartPhases:
    """Seconds of each phase of a start, as the gauge start_phase_seconds. The times of a repeated phase add up."""

    def __init__(self, observations: Observations) -> None:
        self._observations = observations
        self._seconds: dict[str, float] = {}

    def add(self, phase: str, seconds: float) -> None:
        """Adds to the seconds of a phase."""
        self._seconds[phase] = self._seconds.get(phase, 0.0) + seconds
        self._observations.observe("start_phase_seconds", self._seconds[phase], phase=phase)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Adds the time that the body of the context takes, unless it raises."""
        started = time.monotonic()
        yield
        self.add(phase, time.monotonic() - started)


WARM_TOKENS = 1024
WARM_SEQUENCES = 32
"""Warm-up runs eager prefills up to these sizes. Larger ones use the same kernels."""

UNNOTICED = 0.1
"""Seconds by which a token, or audio that nobody listens to yet, may be late."""


@dataclass(frozen=True)
class MemoryRequirements:
    """Bytes that a worker needs beside its weights and pages, measured by running its largest admitted shapes."""

    workspace: int = 0
    """Peak of one eager run. Workers share it, since one runs at a time."""
    state: int = 0
    """Its own: slot state, encoder cache, and the peak of what runs in parallel with the steps of all workers."""

    def beside(self, other: MemoryRequirements) -> MemoryRequirements:
        """The requirements of two parts of a worker together."""
        return MemoryRequirements(max(self.workspace, other.workspace), self.state + other.state)


@dataclass(frozen=True)
class WorkerContext:
    """What a worker gets from its engine. All but the dtype is shared by all workers."""

    config: EngineConfig
    device: torch.device
    dtype: torch.dtype
    """The dtype of this worker's weights and caches."""
    pool: GraphPool
    observations: Observations
    """Metric events, which the loop sends and clears."""
    clock: Callable[[], float]
    """time.monotonic, or a test's own."""


class ModelWorker(Protocol):
    """One hosted model. Its class is called with (name, processor, model, context)."""

    name: str
    """The model name that requests carry."""
    page_bytes: int
    """Bytes of one page, all layers together."""
    max_pages: int
    """The worker cannot use more pages than this."""
    slots: int
    """Requests that can run together."""
    state_rows: int
    """Recurrent states that are in memory, scratch, two of each slot, and snapshots; 0 for models without."""
    state_row_bytes: int
    min_pages: int
    """With fewer pages the engine does not start: they would be too few for one request of a useful length."""

    # Start: measure, allocate, then the captures of the graph runners, calibrate, warm_up.

    def measure(self) -> MemoryRequirements:
        """Runs the largest admitted shapes once."""
        ...

    def allocate(self, num_pages: int) -> None:
        """Allocates caches of `num_pages` pages (the scratch page among them) and slot state."""
        ...

    @property
    def graph_runners(self) -> Sequence[GraphRunner]:
        """The runners of all its captured computations, in the order of their captures, once `allocate` has run."""
        ...

    def calibrate(self) -> None:
        """Measures the costs that scheduling starts with."""
        ...

    def warm_up(self) -> Iterator[None]:
        """Runs once whatever may later run eagerly, at every size that selects another kernel variant, so that no
        kernel is compiled while serving; yields after each run. On a GPU, with nothing in flight, but requests may be
        served between two runs; leaves their state and pages unchanged."""
        ...

    # Commands. They never raise for a bad request: `collect` returns a Failed for it.

    def submit(self, request: Request) -> None: ...

    def control(self, command: Control) -> None:
        """Commands for requests of other workers, or for finished ones, are ignored."""
        ...

    def fail_timed_out(self, now: float) -> None:
        """Fails requests that have had no step for the queue timeout. Called once per heartbeat."""
        ...

    # Stepping.

    def has_work(self) -> bool:
        """Whether something could be launched now; a worker limits its own launches in flight."""
        ...

    def slack(self, now: float) -> float:
        """Seconds until a step must be launched so that no live listener's audio runs out; the cost of the step and of
        delivery is already subtracted. Infinity when nobody listens live."""
        ...

    def backlog(self, now: float) -> float:
        """Predicted seconds of launched work that has not finished."""
        ...

    def smallest_launch(self) -> float:
        """Predicted seconds of the smallest unit of work, which `tick` launches with `must`."""
        ...

    def due(self) -> bool:
        """Whether the next launch should be its own, since it put work off for those of others."""
        ...

    def can_wait(self, now: float, seconds: float) -> bool:
        """True if delaying the next launch by `seconds` causes no underrun, no later first audio, and at most
        UNNOTICED s for other clients."""
        ...

    def others_launched(self, seconds: float) -> None:
        """Another worker launched work of so many predicted seconds."""
        ...

    def tick(self, now: float, allowance: float, *, must: bool = False) -> bool:
        """Launches one step, of as much work as is predicted to take at most `allowance` seconds.

        False when nothing that fits could be launched. must: if nothing fits, launch the smallest unit of work anyway.
        A launch that fails, for lack of memory or otherwise, fails the requests of its batch and no others.
        """
        ...

    def oldest_launch(self) -> float | None:
        """Time of the oldest launch whose results have not been collected; None without one."""
        ...

    def wait(self) -> None:
        """Blocks until the results of the oldest launch have arrived."""
        ...

    def building(self) -> bool:
        """Whether something that a request needs before it can start is being built, elsewhere than on the device."""
        ...

    def collect(self) -> Outputs:
        """What has arrived since the last call, including failures of `submit`; without state and observations."""
        ...

    def state(self) -> ModelState: ...
