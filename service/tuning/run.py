"""Measures the candidates of each GEMM and keeps those that are faster than the rules."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch
from triton.runtime.errors import OutOfResources

from models.layers.kernels import gemm_configs
from models.layers.kernels.gemm_candidates import candidates
from models.layers.kernels.gemm_types import Choice, Shape, Table, Variant
from models.layers.kernels.gpu import Gpu
from models.layers.op import FALLBACKS
from service.engine.startup.precompile import compiling
from service.tuning.gemms import Operands, WrongResult
from service.tuning.shapes import Task
from service.tuning.timer import replay_us

GAIN = 0.97
"""A configuration must take less than this share of the rules' time."""
_CALLS = 32

TimeOf = Callable[[Task, Variant | None], float | None]
"""Microseconds of a configuration (None: by the rules). The result is None if it does not run or gives a wrong
result."""


def variants_of(task: Task, gpu: Gpu) -> list[Variant]:
    """Candidates without deferred norms, whose benefit only whole stacks can show."""
    return [variant for variant in candidates(task.shape, task.max_rows, gpu) if not variant.deferred]


def tune(tasks: Sequence[Task], gpu: Gpu, time_of: TimeOf, report: Callable[[str], None]) -> Table:
    """The choices that are faster than the rules. A shape without one is in the table as well, as measured."""
    found: dict[Shape, list[Choice]] = defaultdict(list)
    for number, task in enumerate(tasks, 1):
        choices, rules = found[task.shape], time_of(task, None)
        times = {variant: us for variant in variants_of(task, gpu) if (us := time_of(task, variant)) is not None}
        if rules is None or not times:
            report(f"{number}/{len(tasks)} {task}: nothing to compare")
            continue
        best = min(times, key=lambda variant: times[variant])
        worth = times[best] < GAIN * rules
        if worth:
            choices.append(Choice(task.min_rows, task.max_rows, best))
        outcome = f"{best} {times[best]:.1f} us" if worth else "by rule"
        report(f"{number}/{len(tasks)} {task}: {outcome} (rule {rules:.1f} us, best of {len(times)} {times[best]:.1f})")
    return {shape: tuple(choices) for shape, choices in found.items()}


def compile_all(tasks: Sequence[Task], gpu: Gpu) -> None:
    """Every candidate, on all processors, so that measuring finds them in Triton's cache."""
    with compiling(), gemm_configs.using({}):
        for task in tasks:
            operands = Operands(task.shape, task.max_rows, torch.device("meta"))
            for variant in variants_of(task, gpu):
                operands.run(0, variant)


class GpuTimer:
    """Times of captured graphs on this GPU. Operands stay from one configuration of a task to the next."""

    def __init__(self) -> None:
        self._task: Task | None = None
        self._operands: Operands | None = None
        self._refused: list[str] = []

    def __call__(self, task: Task, variant: Variant | None) -> float | None:
        if self._operands is None or task != self._task:
            self._operands = None  # first: both at once may not fit the device
            self._task, self._operands = task, Operands(task.shape, task.max_rows, torch.device("cuda"))
        operands, before = self._operands, FALLBACKS.listener
        self._refused.clear()
        FALLBACKS.listener = self._refused.append
        try:
            with gemm_configs.using({}):
                operands.check(variant)
                us, _ = replay_us(lambda index: operands.run(index, variant), _CALLS)
        except (WrongResult, OutOfResources):
            return None
        finally:
            FALLBACKS.listener = before
        return None if self._refused and variant is not None else us
