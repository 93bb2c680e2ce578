"""Compiles every kernel in every configuration that the code chooses on each kind of GPU, without a GPU, and checks
shared memory and registers against the GPU's limits.

    python -m benchmarks.kernels.compile [--gpu sm_89 ...] [--changed | --update] [--out FILE]

Adds the results of the installed Triton to FILE. --update: only for kernels whose source or configurations differ from
those in FILE. --changed: for these, and the first configuration of every other kernel; FILE is not changed. Exits with
1 when something does not fit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.measure.command_line import command_line
from models.layers.kernels.gpu import Gpu, named

OUT = Path("benchmarks/results/kernels/compiled.json")
WITH_TILES = (
    "linear_kernel",
    "_persistent_gemm_kernel",
    "_varlen_kernel",
    "_decode_kernel",
    "_paged_prefill_kernel",
    "_product_kernel",
    "_local_attention_kernel",
)
"""Kernels that keep tiles in shared memory: compiled first."""
MOST_REGISTERS = 255
MOST_REGISTERS_OF_A_BLOCK = 65536


@dataclass(frozen=True)
class Made:
    """Usage of one configuration: bytes of shared memory per block, registers and bytes of stack (for spills) per
    thread."""

    configuration: str
    shared: int
    registers: int
    stack: int
    threads: int

    def faults(self, gpu: Gpu) -> Iterator[str]:
        if self.shared > gpu.shared_memory:
            yield f"{self.shared} bytes of shared memory, {gpu.shared_memory} at most: {self.configuration}"
        if self.registers > MOST_REGISTERS or self.registers * self.threads > MOST_REGISTERS_OF_A_BLOCK:
            yield f"{self.registers} registers in {self.threads} threads: {self.configuration}"


def compiled(launch: Any, configuration: str) -> Made:
    made = launch.kernel.run(*launch.args, grid=(1,), warmup=True, **launch.options)
    registers, stack = resources(made.asm["cubin"])
    return Made(configuration, made.metadata.shared, registers, stack, 32 * made.metadata.num_warps)


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers and stack bytes of a thread, as cuobjdump reads them."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    words = dict(word.split(":") for word in done.stdout.split() if word.count(":") == 1 and word[-1].isdigit())
    return int(words["REG"]), int(words["STACK"])


def of_gpu(gpu: Gpu, known: dict[str, Any] | None, *, keep: bool = False) -> tuple[dict[str, Any], list[str]]:
    """Results by kernel, and faults. known: results by kernel to leave out, but for the first configuration of each;
    empty: of a GPU that nothing is known of, the first of each. keep: known results that hold are taken as they are."""
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import PTXASError

    from benchmarks.kernels.configurations import configurations
    from benchmarks.kernels.offline import offline

    results: dict[str, Any] = {}
    faults: list[str] = []
    with offline(gpu):
        chosen = configurations(gpu)
        for name in sorted(chosen, key=lambda name: (name not in WITH_TILES, name)):
            found = chosen[name]
            same = known is not None and known.get(name, {}).get("hash") == found.hash
            if keep and known is not None and same:
                results[name] = known[name]
                continue
            launches = list(found.launches.items())
            if not keep and known is not None and (not known or same):
                launches = launches[:1]
            made = []
            for key, launch in launches:
                try:
                    made.append(compiled(launch, f"{name} {dict(key[1])} {key[0]}"))
                except (CompilationError, PTXASError) as error:
                    faults.append(f"{named(gpu.capability)}: {name} {dict(key[1])} does not compile: {error}")
            faults += [f"{named(gpu.capability)}: {fault}" for one in made for fault in one.faults(gpu)]
            results[name] = summary(found.hash, made)
            print(f"{named(gpu.capability)} {name}: {results[name]}", flush=True)
    return results, faults


def summary(digest: str, made: list[Made]) -> dict[str, Any]:
    return {
        "hash": digest,
        "configurations": len(made),
        "shared": max((one.shared for one in made), default=0),
        "registers": max((one.registers for one in made), default=0),
        "spilling": sum(one.stack > 0 for one in made),
        "stack": max((one.stack for one in made), default=0),
    }


def totals(gpu: Gpu, kernels: dict[str, Any]) -> dict[str, Any]:
    largest = max(kernels, key=lambda name: kernels[name]["shared"])
    return {
        "for": gpu.name,
        "kernels": len(kernels),
        "configurations": sum(one["configurations"] for one in kernels.values()),
        "shared_limit": gpu.shared_memory,
        "largest_shared": kernels[largest]["shared"],
        "largest_shared_of": largest,
        "most_registers": max(one["registers"] for one in kernels.values()),
        "spilling_configurations": sum(one["spilling"] for one in kernels.values()),
        "by_kernel": kernels,
    }


def main() -> None:
    import triton

    from benchmarks.kernels.offline import ARCHITECTURES

    parser = command_line("benchmarks.kernels.compile", __doc__)
    parser.add_argument("--gpu", nargs="*", default=[named(gpu.capability) for gpu in ARCHITECTURES])
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--changed", action="store_true")
    only.add_argument("--update", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT)
    arguments = parser.parse_args()
    gpus = [gpu for gpu in ARCHITECTURES if named(gpu.capability) in arguments.gpu]
    captured = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    before = captured.get(triton.__version__, {})
    known = [before.get(named(gpu.capability), {}).get("by_kernel", {}) for gpu in gpus]
    workers = min(len(gpus), len(os.sched_getaffinity(0)))
    faults: list[str] = []
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        partly = arguments.changed or arguments.update
        made = pool.map(partial(of_gpu, keep=arguments.update), gpus, known if partly else [None] * len(gpus))
        for gpu, (kernels, wrong) in zip(gpus, made, strict=True):
            before[named(gpu.capability)] = totals(gpu, kernels)
            faults += wrong
    if not arguments.changed:
        arguments.out.write_text(json.dumps(captured | {triton.__version__: before}, indent=1) + "\n")
    print(*faults, sep="\n", file=sys.stderr)
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
