"""Compiles kernels in precompilation without a GPU: for the H100's instructions, by a driver that cannot launch.

python -m tests.support.compile_only     -> a line of JSON: {"names": [kernel ...], "restored": bool,
    "refused": why an H100 with too little shared memory launches no GEMM, and the kernels that fell back}
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from triton import knobs
from triton.runtime.jit import JITFunction

from benchmarks.kernels.offline import ARCHITECTURES, offline
from models.layers.fused import silu_mul
from models.layers.gemm import gemm
from models.layers.kernels import gpu, launch
from models.layers.kernels.gemm_configs import using
from models.layers.kernels.gemm_types import Choice, Shape, Tile, Variant
from models.layers.op import FALLBACKS
from service.engine.start import compiling

H100 = next(one for one in ARCHITECTURES if one.capability == (9, 0))


def launch_gemm() -> None:
    x, weight = (torch.empty(16, 64, device="meta", dtype=torch.bfloat16) for _ in range(2))
    with using({Shape("plain", 64, 16): (Choice(16, 16, Variant(Tile(16, 16, 64, stages=2))),)}):
        gemm.launch(x, weight)


def reason(memory: int) -> list[str]:
    """What launches of a GEMM are refused for after precompilation, and the kernels that fell back."""
    found: list[str] = []
    launch._refused.clear()
    FALLBACKS.listener = found.append
    small = replace(H100, shared_memory=memory)
    with patch.object(gpu, "probe", lambda: small):
        with compiling():
            launch_gemm()
        launch_gemm()
    return [*launch._refused.values(), *found]


def main() -> None:
    names: list[str] = []

    def listen(*, src: Any, **rest: Any) -> None:
        names.append(src.name)

    knobs.compilation.listener = listen
    run = JITFunction.run
    with offline(H100):
        with compiling():
            out = silu_mul.kernel(torch.empty(3, 64, device="meta", dtype=torch.bfloat16))
            assert out.shape == (3, 32)
        done, restored = list(names), JITFunction.run is run
        refused = reason(memory=64)
    print(json.dumps({"names": done, "restored": restored, "refused": refused}))


if __name__ == "__main__":
    main()
