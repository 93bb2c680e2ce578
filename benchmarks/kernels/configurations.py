"""Which configurations of which kernels the code chooses on a GPU, and a hash of each kernel's with its source."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from triton.runtime.jit import JITFunction

from benchmarks.kernels.launch_cases import launch_all
from models.layers.kernels.gpu import Gpu
from service.graphs.buckets import powers_of_two

MOST_ROWS = 160
SIZES: dict[str, set[str]] = {
    "linear_kernel": {"N", "K", "K_SHARE", "A_SHARE"},
    "_gemv_kernel": {"N"},
    "_decode_kernel": {"KV_HEADS", "GROUP", "Q_HEAD", "NEW_K_HEAD", "NEW_V_HEAD", "K_HEAD", "V_HEAD", "LEAST"},
    "_combine_kernel": {"HEADS", "LEAST"},
    "_varlen_kernel": {"HEADS", "GROUP", "Q_HEAD", "K_HEAD", "V_HEAD"},
    "_paged_prefill_kernel": {"HEADS", "GROUP", "Q_HEAD", "K_HEAD", "V_HEAD", "BLOCK_Q", "LEAST"},
    "_prefill_combine_kernel": {"HEADS"},
    "_local_attention_kernel": {"Q_HEAD", "K_HEAD", "V_HEAD", "HEADS", "KV_HEADS", "FIRST"},
    "_rms_norm_kernel": {"WIDTH", "GROUP"},
    "_quantise_rows_kernel": {"WIDTH"},
    "_silu_mul_kernel": {"INNER"},
    "_product_kernel": {"LENGTH", "INPUTS", "OUTPUTS", "CHANNELS"},
    "_snake_kernel": {"LENGTH", "WIDTH"},
    "_unit_kernel": {"LENGTH"},
}
"""Constants that change addresses or how often a loop runs, and neither its tiles nor its stages."""
FLAGS = {"linear_kernel": {"SQUARES"}}
"""Constants for which only zero or not zero matters."""
_HALVES = {"torch.bfloat16": "16 bits", "torch.float16": "16 bits"}
"""Their tiles are alike."""

Key = tuple[Any, ...]


@dataclass
class Launch:
    """One configuration, as it is first launched."""

    kernel: Any
    args: tuple[Any, ...]
    options: dict[str, Any]


@dataclass
class Found:
    """The configurations of one kernel, by what tells them apart."""

    kernel: Any
    launches: dict[Key, Launch] = field(default_factory=dict)

    @property
    def hash(self) -> str:
        digest = hashlib.sha256("".join(sources_of(self.kernel)).encode())
        digest.update(repr(sorted(self.launches)).encode())
        return digest.hexdigest()[:16]


def sources_of(kernel: Any) -> list[str]:
    """Sources of a kernel and of all Triton functions that it calls, in a fixed order."""
    seen: dict[str, str] = {}

    def visit(function: Any) -> None:
        name = f"{function.module}.{function.fn.__name__}"
        if name in seen:
            return
        seen[name] = function.src
        for used in function.fn.__code__.co_names:
            called = function.fn.__globals__.get(used)
            if isinstance(called, JITFunction) and not called.module.startswith("triton."):
                visit(called)

    visit(kernel)
    return [seen[name] for name in sorted(seen)]


def key_of(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Key:
    name = kernel.fn.__name__
    dtypes = tuple(_HALVES.get(kind := str(arg.dtype), kind) for arg in args if isinstance(arg, Tensor))
    constants = []
    for option, value in sorted(options.items()):
        if option not in SIZES.get(name, ()):
            constants.append((option, str(bool(value) if option in FLAGS.get(name, ()) else value)))
    return dtypes, tuple(constants)


@contextmanager
def launches_go_to(take: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]) -> Iterator[None]:
    run = JITFunction.run

    def ask(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        take(self, args, options)

    JITFunction.run = ask
    try:
        yield
    finally:
        JITFunction.run = run


def configurations(gpu: Gpu) -> dict[str, Found]:
    """By kernel name. Call it inside `offline(gpu)`, where they can be compiled afterwards."""
    found: dict[str, Found] = {}

    def take(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        of_kernel = found.setdefault(kernel.fn.__name__, Found(kernel))
        of_kernel.launches.setdefault(key_of(kernel, args, options), Launch(kernel, args, options))

    with launches_go_to(take):
        launch_all(tuple(powers_of_two(MOST_ROWS)))
    if not gpu.has_tma:
        _assert_older(found)
    return dict(sorted(found.items()))


def _assert_older(found: dict[str, Found]) -> None:
    """Before Hopper there are no descriptors and no dependent launches."""
    for name, of_kernel in found.items():
        for launch in of_kernel.launches.values():
            if launch.options.get("TMA") or launch.options.get("PDL") or "launch_pdl" in launch.options:
                raise AssertionError(f"{name} asks for what this GPU has not: {launch.options}")
