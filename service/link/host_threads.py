"""Threads that compute on the host, and how they wait for each other.

torch's threads synchronise at the end of each operation. By default, waiting OpenMP threads spin, each on a whole
processor. If the machine has other work, they keep the thread that they wait for from running, and a step takes as long
as the scheduler's time slices. So here waiting threads sleep.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from models.interfaces import cpus
from service.link.config import EngineConfig

MAX_THREADS = 16
"""Limit of the default, since each operation waits for its slowest thread."""
SMALL_BYTES = 64 << 20
"""With fewer bytes of weights than this, an operation ends before a second thread has woken up. On two idle processors
an embedded model takes 38 ms for an answer of 16 tokens with two spinning threads, 74 ms with two sleeping ones, and 39
ms with one."""


def num_threads(config: EngineConfig, environ: Mapping[str, str] = os.environ) -> int:
    """The setting `threads`, else OMP_NUM_THREADS, else one for small models, else one for each usable processor up to
    MAX_THREADS. Several engines divide the processors."""
    if config.threads is not None:
        return config.threads
    named = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if named.isdecimal() and int(named) > 0:
        return int(named)
    return 1 if _are_small(config) else min(MAX_THREADS, max(1, cpus.available() // config.sharers))


def thread_variables(config: EngineConfig, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment variables for a process that will load torch. Variables that the operator has set are kept.

    GNU's OpenMP reads OMP_WAIT_POLICY, LLVM's and Intel's KMP_BLOCKTIME (milliseconds); OpenBLAS and MKL take their
    number of threads from OMP_NUM_THREADS.
    """
    waiting = {"OMP_WAIT_POLICY": "PASSIVE", "KMP_BLOCKTIME": "0"}
    if "OMP_WAIT_POLICY" in environ:  # which Intel's library reads only if its own variable is not set
        waiting = {}
    kept = {name: value for name, value in waiting.items() if name not in environ}
    return kept | {"OMP_NUM_THREADS": str(num_threads(config, environ))}


def _are_small(config: EngineConfig) -> bool:
    """Whether the weights of all models together are small; False if there are no files (random weights)."""
    sizes = [path.stat().st_size for model in config.models for path in Path(model.directory).glob("*.safetensors")]
    return 0 < sum(sizes) < SMALL_BYTES
