"""`reprise serve` whose engine is told that its GPU has SMALL_GPU_BYTES bytes, as its parent holds the rest.

python -m benchmarks.servers.small_gpu serve [server flags]
"""

from __future__ import annotations

import os
from unittest.mock import patch

from service.cli.main import main
from service.link.config import Channel, EngineConfig
from service.link.engine_link import EngineProcess

PROGRAM = ("benchmarks.servers.small_gpu", "serve")
GPU_BYTES = "SMALL_GPU_BYTES"


def engine(config: EngineConfig, channel: Channel) -> None:
    """What an engine's process runs in place of service.engine.start.serve."""
    import torch  # which the API process does not import

    from service.engine import start

    num_bytes, memory = int(os.environ[GPU_BYTES]), torch.cuda.mem_get_info
    with (
        patch.object(torch.cuda, "mem_get_info", lambda *device: (memory(*device)[0], num_bytes)),
        patch.object(start, "total_memory", lambda device: num_bytes if device.type == "cuda" else None),
    ):
        start.serve(config, channel)


if __name__ == "__main__":
    start, entry = EngineProcess.start, "benchmarks.servers.small_gpu:engine"
    with patch.object(EngineProcess, "start", lambda config, _: start(config, entry)):
        main()
