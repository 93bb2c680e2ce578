"""What a GPU has that kernels and the choice of their configurations depend on. Imports neither Triton
nor, before it is asked for a device, torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from typing import Any

Capability = tuple[int, int]

LEAST_CAPABILITY: Capability = (8, 0)
"""Below it there are no bfloat16 tensor cores and no asynchronous copies into shared memory."""
_TMA: Capability = (9, 0)
"""From here on there are tensor memory access (TMA) and programmatic dependent launch."""


@dataclass(frozen=True)
class Gpu:
    """shared_memory: the most bytes that one thread block may ask for. num_sms: streaming multiprocessors."""

    name: str
    capability: Capability
    shared_memory: int
    num_sms: int

    @property
    def has_tma(self) -> bool:
        """TMA descriptors bring tiles; without it, threads copy by pointers, pipelined by num_stages."""
        return self.capability >= _TMA

    @property
    def has_dependent_launch(self) -> bool:
        return self.capability >= _TMA

    @property
    def copies_one_stage_fewer(self) -> bool:
        """Tensor cores read registers (mma), so that a pipeline of n stages holds n - 1 tiles of both operands in
        shared memory. Hopper's and data centre Blackwell's (wgmma, tcgen05) read shared memory and hold all n."""
        return self.capability[0] not in (9, 10)


INTERPRETER = Gpu("Triton's interpreter", (9, 0), 227 << 10, 132)
"""It pretends to be an H100."""


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def named(capability: Capability) -> str:
    """(8, 9) -> "sm_89"."""
    return f"sm_{capability[0]}{capability[1]}"


def current_gpu() -> Gpu:
    """The device that kernels of this process run on."""
    return probe()


@cache
def probe() -> Gpu:
    """Asks the driver, once. What compiles for a GPU that is not there puts another function in its place."""
    if interpreted():
        return INTERPRETER
    import torch

    return gpu_of(torch.cuda.get_device_properties(torch.cuda.current_device()))


def gpu_of(properties: Any) -> Gpu:
    """Of torch.cuda.get_device_properties, whose published types lack the shared memory that a block may ask for."""
    capability = properties.major, properties.minor
    memory = properties.shared_memory_per_block_optin
    return Gpu(properties.name, capability, memory, properties.multi_processor_count)
