"""The GEMMs of a checkpoint that have configurations of their own, and the numbers of rows they are measured for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from models.checkpoints.registry import family_of, resolve
from models.layers.block import Block, SelfAttention
from models.layers.kernels.gemm_types import Kind, Shape
from models.layers.mla import LatentAttention
from models.layers.mlp import MLP, SwiGLU

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
    of_blocks = {module.mlp for module in modules if isinstance(module, Block)}
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
    if isinstance(module, SelfAttention):
        return (_shape("plain", module.qkv), _shape("add_norm", module.out))
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
