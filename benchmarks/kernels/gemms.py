"""The GEMMs of VoxCPM2's local decoder, of two language models in decode steps and prefills, and of Qwen2-VL's
encoder: every variant, against the rules without a table (cuBLAS or streamed weights and
kernels around them)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from benchmarks.kernels.timing import Case
from models.layers.kernels import gemm_configs
from models.layers.kernels.gemm_candidates import candidates
from models.layers.kernels.gemm_types import Kind, Shape, Variant
from models.layers.kernels.gpu import INTERPRETER as H100
from service.tuning.run import Operands, Run


@dataclass(frozen=True)
class Part:
    """One GEMM of a layer; outputs as in gemm_configs.Shape."""

    name: str
    kind: Kind
    inputs: int
    outputs: int

    @property
    def shape(self) -> Shape:
        return Shape(self.kind, self.inputs, self.outputs)


@dataclass(frozen=True)
class Stack:
    """least: the smallest number of rows that has a choice. Each number of `rows` is measured for all numbers down to
    the previous one; with `most`, for all from the corresponding number of `most` down to the previous one."""

    name: str
    parts: tuple[Part, ...]
    least: int
    rows: tuple[int, ...]
    most: tuple[int, ...] = ()

    def span(self, rows: int) -> tuple[int, int]:
        """The fewest and the most rows that a choice measured at `rows` is for."""
        most = self.most or self.rows
        index = self.rows.index(rows)
        return most[index - 1] + 1 if index else self.least, most[index]


def layer(hidden_size: int, intermediate_size: int, heads: int, kv_heads: int) -> tuple[Part, ...]:
    return (
        Part("qkv", "plain", hidden_size, (heads + 2 * kv_heads) * 128),
        Part("out", "add_norm", heads * 128, hidden_size),
        Part("gate_up", "silu_mul", hidden_size, intermediate_size),
        Part("down", "add_norm", intermediate_size, hidden_size),
    )


PREFILLS, POWERS_OF_TWO = (128, 256, 448), (128, 256, 512)
"""A prefill has any number of rows: choices change where a warm-up of powers of two meets them."""
STACKS = (
    Stack("locdit", layer(1024, 4096, 16, 2), 129, (176, 352, 704, 1408)),
    Stack("voxcpm2 lm", layer(2048, 6144, 16, 2), 2, (8, 16, 32, 64)),
    Stack("qwen2b", layer(1536, 8960, 12, 2), 2, (8, 16, 32, 64)),
    Stack("voxcpm2 lm prefill", layer(2048, 6144, 16, 2), 65, PREFILLS, POWERS_OF_TWO),
    Stack("qwen2b prefill", layer(1536, 8960, 12, 2), 65, PREFILLS, POWERS_OF_TWO),
    Stack("qwen2 encoder", (Part("fc1", "quick_gelu", 1280, 5120),), 129, (256, 1024, 4096)),
)


def variants(part: Part, rows: int) -> Iterator[Variant]:
    """All that fit the shape on an H100, with and without TMA."""
    return candidates(part.shape, rows, H100)


def _make(part: Part, rows: int, variant: Variant | None) -> Run:
    operands = Operands(part.shape, rows, torch.device("cuda"))

    def run(index: int) -> object:
        if variant is not None:
            return operands.run(index, variant)
        with gemm_configs.using({}):
            return operands.run(index, None)

    with gemm_configs.using({}):
        operands.check(variant)
    return run


def shape_name(stack: Stack, part: Part, rows: int) -> str:
    return f"{stack.name} {part.name}, {rows} rows"


def cases() -> list[Case]:
    found = []
    for stack in STACKS:
        for part in stack.parts:
            for rows in stack.rows:
                shape = shape_name(stack, part, rows)
                runs = {"rules": None, **{str(variant): variant for variant in variants(part, rows)}}
                for name, variant in runs.items():
                    make = lambda a=(part, rows, variant): _make(*a)  # noqa: E731
                    found.append(Case(part.kind, shape, name, make))
    return found
