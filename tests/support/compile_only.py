"""Compiles one kernel in a rehearsal without a GPU: for the H100's instructions, by a driver that cannot launch.

python -m tests.support.compile_only     -> a line of JSON: {"names": [kernel ...], "restored": bool}
"""

from __future__ import annotations

import json
from typing import Any

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from models.layers.kernels.elementwise import silu_mul_cuda
from service.engine.rehearsal import compiling


class Offline:
    """What a launch asks of a driver before it launches."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main() -> None:
    names: list[str] = []

    def listen(*, src: Any, **rest: Any) -> None:
        names.append(src.name)

    driver.set_active(Offline())
    torch.cuda.get_device_capability = lambda *device: (9, 0)
    knobs.compilation.listener = listen
    run = JITFunction.run
    with compiling():
        out = silu_mul_cuda(torch.empty(3, 64, device="meta", dtype=torch.bfloat16))
        assert out.shape == (3, 32)
    print(json.dumps({"names": names, "restored": JITFunction.run is run}))


if __name__ == "__main__":
    main()
