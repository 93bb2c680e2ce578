"""Measures the candidates of each GEMM, with random operands, and keeps those that are faster than the rules."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import Tensor, nn
from triton.runtime.errors import OutOfResources

from models.checkpoints.registry import family_of, resolve
from models.layers.block import Block, SelfAttention
from models.layers.fused import silu_mul
from models.layers.gated_attention import GatedAttention
from models.layers.gated_delta import GatedDeltaNet
from models.layers.kernels import gemm, gemm_configs, tiled_gemm
from models.layers.kernels.gemm_candidates import candidates
from models.layers.kernels.gemm_types import Choice, Kind, Shape, Table, Variant
from models.layers.kernels.gpu import Gpu
from models.layers.mla import LatentAttention
from models.layers.mlp import MLP, SwiGLU
from models.layers.norms import DeferredNorm, Normed, rms_norm
from models.layers.op import FALLBACKS
from models.layers.quantized import QuantizedWeight, Weight
from models.qwen_vl.v3_5.language import HybridBlock
from service.engine.precompile import compiling

EPS = 1e-5
MAX_ERROR = 8e-3
"""Allowed error relative to the result's norm: that of rounding to bfloat16, with a margin."""
MAX_EIGHT_BIT_ERROR = 5e-2
"""The same for activations that are rounded to e4m3."""
_BEYOND_L2 = 200e6
"""Bytes of weights that are used in turn, so that each is read from memory."""


class WrongResult(Exception):
    """A configuration gives a wrong result."""


def _in_e4m3(weight: Tensor) -> QuantizedWeight:
    with weight.device:
        made = QuantizedWeight(*weight.shape)
    if not weight.is_meta:
        made.rows.quantise(weight, "a weight")
    return made


class Operands:
    """x [rows, inputs] and weights of a shape in bfloat16, enough of them to leave the L2 cache behind."""

    def __init__(self, shape: Shape, rows: int, device: torch.device) -> None:
        def random(*size: int, scale: float = 1.0) -> Tensor:
            return torch.randn(size, device=device, dtype=torch.bfloat16) * scale

        self.shape = shape
        columns = shape.outputs * (2 if shape.kind == "silu_mul" else 1)
        copies = max(2, min(24, int(_BEYOND_L2 / (columns * shape.inputs * (1 if shape.e4m3 else 2)))))
        self.x = random(rows, shape.inputs)
        made = (random(columns, shape.inputs, scale=shape.inputs**-0.5) for _ in range(copies))
        self.weights: list[Weight] = [_in_e4m3(weight) if shape.e4m3 else weight for weight in made]
        self.bias, self.norm, self.residual = random(columns), random(columns), random(rows, columns)

    def run(self, index: int, variant: Variant | None) -> Tensor | tuple[Normed, Tensor]:
        """Runs it with weight number `index`. None: by the rules for shapes without a table entry."""
        weight = self.weights[index % len(self.weights)]
        return self._by_rule(weight) if variant is None else self._configured(weight, variant)

    def _by_rule(self, weight: Weight) -> Tensor | tuple[Normed, Tensor]:
        match self.shape.kind:
            case "add_norm":
                return gemm.gemm_add_norm(self.x, weight, None, self.residual, self.norm, EPS)
            case "quick_gelu":
                return gemm.gemm(self.x, weight, self.bias, "quick_gelu")
            case "silu_mul":
                return gemm.gemm(self.x, weight, None, "silu_mul")
        return gemm.gemm(self.x, weight, None)

    def _configured(self, weight: Weight, variant: Variant) -> Tensor | tuple[Normed, Tensor]:
        x, tile, after = self.x, variant.tile, (self.residual, self.norm, EPS)
        made = partial(tiled_gemm.tiled_gemm, x, weight, tile=tile, eight_bit=variant.eight_bit)
        match self.shape.kind:
            case "add_norm" if variant.deferred:
                return tiled_gemm.gemm_add_deferred_norm(x, weight, None, *after, tile, eight_bit=variant.eight_bit)
            case "add_norm":
                return tiled_gemm.split_gemm_add_norm(
                    x, weight, None, *after, split=variant.split, tile=tile, eight_bit=variant.eight_bit
                )
            case "quick_gelu":
                return made(bias=self.bias, epilogue="quick_gelu")
            case "silu_mul":
                return made(epilogue="silu_mul")
        return made()

    def check(self, variant: Variant | None) -> None:
        """Raises WrongResult if the result with the first weight differs from the reference in float64."""
        # By the rules, many rows with a weight in e4m3 have 8-bit activations.
        eight_bit = variant.eight_bit if variant is not None else self.shape.e4m3
        made = self.run(0, variant)
        out, expected = made[0] if isinstance(made, tuple) else made, self._expected
        if isinstance(out, DeferredNorm):
            mean = out.squares.sum(1, keepdim=True) / self.shape.outputs
            out = out.rows.double() * torch.rsqrt(mean.double() + EPS)
        assert isinstance(out, Tensor)
        error = float((out.double() - expected).norm() / expected.norm())
        if not error < (MAX_EIGHT_BIT_ERROR if eight_bit else MAX_ERROR):
            raise WrongResult(f"relative error {error:.1e}")

    @cached_property
    def _expected(self) -> Tensor:
        weight = self.weights[0]
        wide = weight.dequantised(torch.float64) if isinstance(weight, QuantizedWeight) else weight.double()
        product = self.x.double() @ wide.T
        match self.shape.kind:
            case "silu_mul":
                return silu_mul.reference(product)
            case "quick_gelu":
                product = product + self.bias.double()
                return product * torch.sigmoid(1.702 * product)
            case "add_norm":
                return rms_norm.reference(product + self.residual.double(), self.norm.double(), EPS)
        return product


_MIN_ROWS = 2
"""A single row has a kernel of its own."""
_MAX_ROWS = {"decoder": 512, "local": 2048, "encoder": 4096}
"""Beyond these no configuration is chosen. A warm-up runs each power of two up to them: prefills, and the rows of 64
streams of a speech model or of an encoder's pictures."""
_MIN_ENCODER_ROWS = 129


@dataclass(frozen=True, order=True)
class Task:
    """One shape for `min_rows` to `max_rows` rows; it is measured at the maximum."""

    shape: Shape
    min_rows: int
    max_rows: int

    def __str__(self) -> str:
        return f"{self.shape.kind} {self.shape.inputs} -> {self.shape.outputs}, {self.min_rows} to {self.max_rows} rows"


def tasks_of(directory: Path) -> list[Task]:
    """GEMMs of the checkpoint in `directory`, whose weights are not read. CheckpointError if it cannot be hosted."""
    family = family_of(directory)
    meta = torch.device("meta")
    model = resolve(family.model)(directory, meta, torch.bfloat16, "random")
    modules = list(_modules(model))
    tasks: dict[Task, None] = {}
    networks: Sequence[nn.Module] = model.local_networks if family.kind == "speech" else ()
    local = {module for network in networks for module in network.modules()}
    of_blocks = {module.mlp for module in modules if isinstance(module, Block | HybridBlock)}
    for module in modules:
        if shapes := _shapes(module, in_block=module in of_blocks):
            largest = _MAX_ROWS["local" if module in local else "decoder"]
            tasks |= dict.fromkeys(Task(shape, *rows) for shape in shapes for rows in spans(_MIN_ROWS, largest))
        elif isinstance(module, MLP) and module.activation == "quick_gelu":
            shape = Shape("quick_gelu", module.fc1.in_features, module.fc1.out_features)
            tasks |= dict.fromkeys(Task(shape, *rows) for rows in spans(_MIN_ENCODER_ROWS, _MAX_ROWS["encoder"]))
    return list(tasks)


def _modules(model: object) -> Iterator[nn.Module]:
    """All modules of a model that is a module, or holds some."""
    for part in [model] if isinstance(model, nn.Module) else vars(model).values():
        if isinstance(part, nn.Module):
            yield from part.modules()


def _shapes(module: nn.Module, *, in_block: bool) -> tuple[Shape, ...]:
    """The projections of a block are followed by residual and norm, those of other modules by nothing."""
    if isinstance(module, SelfAttention | GatedAttention):
        return (_shape("plain", module.qkv), _shape("add_norm", module.out))
    if isinstance(module, GatedDeltaNet):
        return (_shape("plain", module.in_qkvz), _shape("add_norm", module.out))
    if isinstance(module, SwiGLU):
        gate_up = module.gate_up
        after: Kind = "add_norm" if in_block else "plain"
        return (Shape("silu_mul", gate_up.in_features, gate_up.out_features // 2), _shape(after, module.down))
    if isinstance(module, LatentAttention):
        return tuple(_shape("plain", layer) for layer in (module.q, module.kv_down, module.out))
    return ()


def _shape(kind: Kind, layer: nn.Linear) -> Shape:
    return Shape(kind, layer.in_features, layer.out_features)


def spans(first: int, last: int) -> list[tuple[int, int]]:
    """Spans of rows that end at powers of two from 8 on, so that a warm-up by powers of two runs each."""
    found, end = [], 8
    while first <= last:
        if first <= end:
            found.append((first, min(end, last)))
            first = end + 1
        end *= 2
    return found


Run = Callable[[int], object]
"""Runs once on input set number i (modulo the number of sets)."""

_REPEATS = 15


def replay_us(run: Run, calls: int) -> tuple[float, float]:
    """Median and spread (max - min without the extremes) of one call's microseconds inside a graph of `calls` calls."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for index in range(3):
            run(index)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(calls):
            run(index)
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(_REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / calls)
    times.sort()
    inner = times[1:-1]
    return statistics.median(times), inner[-1] - inner[0]


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
