"""Main memory of the helper processes of an engine, with a vocabulary of published size; needs no GPU.

    python -m benchmarks.process_memory

`standby` has imported what an engine imports and waits to be the next one; `mask_server` has read the vocabulary of
Qwen2-VL and built one grammar. resident_bytes: of the process; private_bytes: what it shares with no other.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path

from benchmarks.checkpoints.published import make
from benchmarks.checkpoints.tokenizers import grow_file
from benchmarks.measure.record import Row, table, write
from models.checkpoints.registry import family_of, resolve
from service.api.structured.grammar import regex_grammar
from service.engine.chat.guided.guidance import Guidance
from service.engine.chat.guided.mask_hosts import MaskProcess, SharedMasks
from service.link.config import EngineConfig, ModelConfig
from service.link.standby import ENTRY, STANDBY, start_engine_process

MODEL = "qwen2_vl_2b"
ROWS = 64
LOOK_SECONDS, STEADY_LOOKS = 0.5, 6


def memory_of(pid: int) -> dict[str, int]:
    """From /proc/PID/smaps_rollup (proc(5))."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]
    kilobytes = {name: int(value.split()[0]) for name, value in (line.split(":") for line in lines)}
    private = kilobytes["Private_Clean"] + kilobytes["Private_Dirty"]
    return {"resident_bytes": 1024 * kilobytes["Rss"], "private_bytes": 1024 * private}


def settled(pid: int) -> dict[str, int]:
    """Once it has not changed for a few seconds."""
    last, same = memory_of(pid), 0
    while same < STEADY_LOOKS:
        time.sleep(LOOK_SECONDS)
        now = memory_of(pid)
        same = same + 1 if now == last else 0
        last = now
    return last


async def standby(config: EngineConfig) -> dict[str, int]:
    process = await start_engine_process(config, STANDBY, ENTRY)
    try:
        return await asyncio.to_thread(settled, process.pid)
    finally:
        process.kill()
        await process.wait()


def mask_server(directory: Path, vocabulary: int) -> dict[str, int]:
    host = MaskProcess(str(directory), vocabulary, SharedMasks(ROWS, -(-vocabulary // 32)), EngineConfig(models=()))
    guidance = Guidance([host])
    guidance.begin(regex_grammar("[a-z]+"))
    while not guidance.take_built():
        guidance.receive(1.0)
    assert host.pid is not None
    return settled(host.pid)


def main() -> Path:
    with tempfile.TemporaryDirectory() as folder:
        directory = make(MODEL, Path(folder))
        grow_file(directory / "tokenizer.json")
        vocabulary = resolve(family_of(directory).processor)(directory).vocab_size
        config = EngineConfig((ModelConfig(MODEL, str(directory)),))
        rows: list[Row] = [
            {"process": "standby", **asyncio.run(standby(config))},
            {"process": "mask_server", **mask_server(directory, vocabulary)},
        ]
    print(table(rows))
    return write("process_memory", rows, model=MODEL, vocabulary=vocabulary)


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__).parse_args()
    main()
