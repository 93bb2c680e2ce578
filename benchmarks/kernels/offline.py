"""A GPU that is not there: Triton compiles for its instructions, and launches nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from models.layers.kernels import gpu as gpus
from models.layers.kernels.gpu import Gpu

KIB = 1 << 10
ARCHITECTURES = (
    Gpu("A100", (8, 0), 163 * KIB, 108),
    Gpu("RTX 3090, A10", (8, 6), 99 * KIB, 82),
    Gpu("RTX 4090, L4, L40S", (8, 9), 99 * KIB, 128),
    Gpu("H100, H200", (9, 0), 227 * KIB, 132),
    Gpu("B200", (10, 0), 227 * KIB, 148),
    Gpu("RTX 5090", (12, 0), 99 * KIB, 170),
)
"""One GPU of each compute capability, with the shared memory that CUDA lets a thread block request there."""


class Offline:
    """The part of Triton's driver that is used before a launch."""

    def __init__(self, gpu: Gpu) -> None:
        self._target = GPUTarget("cuda", 10 * gpu.capability[0] + gpu.capability[1], 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextmanager
def offline(gpu: Gpu) -> Iterator[None]:
    """Kernels' configurations are chosen, and compiled, for `gpu`: one in a process, since Triton keeps the target."""

    driver.set_active(Offline(gpu))
    with patch.object(gpus, "probe", lambda: gpu):
        yield
