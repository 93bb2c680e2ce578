"""Comparison with float64 on fresh random inputs; outputs are poisoned before each run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from models.layers.op import Op

CPU = torch.device("cpu")


def sixteen_bits(device: torch.device) -> torch.dtype:
    """bfloat16; float16 in the interpreter, which has no bfloat16 arithmetic of its own: it takes the same paths."""
    return torch.bfloat16 if device.type == "cuda" else torch.float16


def relative_error(out: Tensor, reference: Tensor) -> float:
    """||out - reference|| / ||reference||; NaN where out has one."""
    difference = out.double().cpu() - reference.double().cpu()
    return float(difference.norm() / reference.double().cpu().norm())


def upcast(*tensors: Any) -> list[Any]:
    """Tensors on the CPU, floating ones as float64; the rest as it is. Functions that dispatch run their reference."""
    return [t.cpu() if isinstance(t, Tensor) else t for t in wide_in_place(*tensors)]


def wide_in_place(*tensors: Any) -> list[Any]:
    """Floating tensors as float64 on their device, for references at sizes that a CPU takes long for."""
    return [t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for t in tensors]


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """torch.empty and empty_like give NaN, so that an element that is not written shows."""
    empty, empty_like = torch.empty, torch.empty_like

    def poison(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **kwargs: Any) -> Tensor:
            tensor = make(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return made

    torch.empty, torch.empty_like = poison(empty), poison(empty_like)
    try:
        yield
    finally:
        torch.empty, torch.empty_like = empty, empty_like


def replayed(device: torch.device, run: Callable[[], Any]) -> Any:
    """On a GPU, run inside a captured graph with poisoned allocations and return the outputs of its replay."""
    with poisoned_allocations():
        if device.type != "cuda":
            return run()
        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outputs = run()
        graph.replay()
        torch.cuda.synchronize()
        return outputs


@contextmanager
def by_kernels(device: torch.device) -> Iterator[None]:
    """On a CPU operations run as on a GPU, with kernels in the interpreter."""
    if device != CPU:
        yield
        return

    def run(op: Any, *args: Any, **kwargs: Any) -> Any:
        takes = op._takes is None or op._takes(*args, **kwargs)
        return op.launch(*args, **kwargs) if takes else op.reference(*args, **kwargs)

    with patch.object(Op, "__call__", run):
        yield
