"""What the host does in a decode step with guided rows, by stage, beside a simulated GPU, on a CPU.

    python -m benchmarks.guided_path [--rounds 5] [--name guided_path]

The engine's loop and its links to four mask servers and four API processes are real. The GPU's layers, its sampling and
the masks take fixed times without a processor, so that two are enough, and calls of CUDA cost nothing. All masks allow
every token. GPU and masks twice as fast show what a host half as fast would lose, since then nothing else is faster.

Times are microseconds of a step of the engine's thread: `host` is all of it but waiting for tokens and masks; `idle` is
the GPU's. Lower quartiles of parts of 30 steps, since other work on the machine only adds.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.checkpoints.served import VOCABULARY, miniature_directory
from benchmarks.loads.invoices import invoice
from benchmarks.measure.record import Row, record
from benchmarks.measure.self_times import SelfTimes
from benchmarks.servers.paced_masks import MASKS, PacedMasks
from models.media import Prompt
from models.protocol import Bucket, Capturable
from service.api.chat.grammar import json_schema_grammar
from service.engine import engine as loop
from service.engine import start
from service.engine.chat import guidance, mask_table, masks, outbox, worker
from service.engine.chat import runner as runners
from service.engine.memory import plan_pages
from service.graphs.observations import Observations
from service.graphs.pool import Capture, GraphPool, RouteSeconds
from service.link import wire
from service.link.config import EngineConfig, ModelConfig
from service.link.messages import Abort, Attach, ChatRequest, SamplingParams
from service.link.shared import SUPERVISOR, SharedChannel

LAYERS, SAMPLE = 1.8e-3, 1.5e-4
"""Seconds of an H100 with Qwen2-VL-2B."""
SCALES = (1.0, 0.5)
"""Of these times."""
PEERS = 4
WARM_UP, PARTS, STEPS = 60, 12, 30
"""Steps before a measurement, parts of it, and steps of each."""
LOADS = {
    "32 free": (32, 0),
    "32 guided": (0, 32),
    "64 free": (64, 0),
    "64 guided": (0, 64),
    "40 free": (40, 0),
    "32 free, 8 guided": (32, 8),
}
"""Free and guided rows."""
BESIDE = {"32 guided": "32 free", "64 guided": "64 free", "32 free, 8 guided": "40 free"}
PEER_PROCESS = """
import sys, zmq
context, poller = zmq.Context(), zmq.Poller()
for name in sys.argv[2:]:
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.IDENTITY, name.encode())
    socket.connect(sys.argv[1])
    socket.send(sys.stdin.buffer.readline().strip())
    poller.register(socket)
while True:
    for socket, _ in poller.poll():
        socket.recv_multipart()
"""


STAGES = SelfTimes()


class Gpu:
    """A stream whose launches take fixed times. idle: seconds it had nothing to do."""

    def __init__(self) -> None:
        self.scale = 1.0
        self.idle: defaultdict[str, float] = defaultdict(float)
        self._free_at = 0.0

    @property
    def free_at(self) -> float:
        return max(self._free_at, time.perf_counter())

    def launch(self, kind: str, seconds: float) -> None:
        now = time.perf_counter()
        self.idle[kind] += max(0.0, now - self._free_at)
        self._free_at = max(now, self._free_at) + self.scale * seconds


GPU = Gpu()


class Readback:
    """service.engine.readback.Readback of the simulated GPU. As CUDA does, it spins while it waits."""

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device, begun: object = None) -> None:
        self._host = {name: tensor.clone() for name, tensor in tensors.items()}
        self._at = GPU.free_at

    def ready(self) -> bool:
        return time.perf_counter() >= self._at

    def wait(self) -> None:
        with STAGES.within("wait_for_tokens"):
            while time.perf_counter() < self._at:
                pass

    def seconds(self) -> float | None:
        return None

    def read(self) -> dict[str, np.ndarray]:
        return {name: tensor.numpy() for name, tensor in self._host.items()}


class Table(mask_table.MaskTable):
    """Its copies cost nothing."""

    @contextmanager
    def sent(self, slots: np.ndarray, mask_rows: np.ndarray, count: int) -> Iterator[None]:
        rows = self._rows.numpy()
        rows[:, len(slots) :] = 0
        rows[0, : len(slots)], rows[1, : len(slots)] = slots, mask_rows
        yield


class Pool(GraphPool):
    """Captures nothing: a replay occupies the GPU."""

    def __init__(self, hidden: Callable[[], int]) -> None:
        super().__init__(torch.device("cpu"), 8 << 30)
        self._hidden = hidden

    def capture(self, capturable: Capturable, bucket: Bucket, buffers: Mapping[str, Tensor]) -> Capture:
        name = capturable.name.removesuffix("_full")
        rows = bucket.get("rows", 1)
        outputs: dict[str, Tensor] = {"results": torch.zeros((rows, 2), dtype=torch.int32)}

        def replay() -> None:
            if name == "guided_layers":
                GPU.launch("layers", LAYERS)
            elif name == "decode":
                GPU.launch("decode", LAYERS + SAMPLE)
            elif name == "guided_sample":
                GPU.launch("sampling", SAMPLE)
            else:
                GPU.launch("prefill", LAYERS + SAMPLE)

        if name in ("prefill", "cached_prefill"):
            outputs = {"hidden": torch.zeros(bucket["tokens"], self._hidden())}
        elif name == "vision":
            outputs = {"embeds": torch.zeros(bucket["patches"] // 4, self._hidden())}
        elif name == "guided_layers":
            outputs = {}
        return Capture(replay, outputs, RouteSeconds(1e3, LAYERS))


def watch() -> None:
    for owner, name, stage in (
        (SharedChannel, "receive", "receive_commands"),
        (SharedChannel, "send", "send_tokens"),
        (loop.Engine, "_launch", "choose_launch"),
        (loop.Engine, "_send", "end_turn"),
        (Observations, "drain", "end_turn"),
        (worker.ChatWorker, "collect", "collect"),
        (worker.ChatWorker, "_read", "read_tokens"),
        (worker.ChatWorker, "_sample_held", "go_on"),
        (worker.Scheduler, "schedule", "schedule"),
        (worker.Scheduler, "launched", "schedule"),
        (runners.ChatRunner, "launch", "launch_layers"),
        (runners.ChatRunner, "sample", "launch_sampling"),
        (guidance.Guidance, "masks", "make_job"),
        (guidance.Guidance, "take_built", "receive_masks"),
        (guidance.Guidance, "receive", "receive_masks"),
        (guidance.Guidance, "_messages", "wait_for_masks"),
        (masks.MaskJob, "_fetch", "fetch_tokens"),
        (masks.MaskJob, "_ask", "ask_for_masks"),
        (guidance.Guidance, "compute", "ask_for_masks"),
        (outbox.Outbox, "take", "collect"),
    ):
        STAGES.watch(owner, name, stage)


class Simulation:
    """An engine whose turns are called by hand."""

    def __init__(self, folder: Path) -> None:
        worker.Readback = Readback  # type: ignore[misc, assignment]
        runners.MaskTable = Table  # type: ignore[misc]
        self.masks = PacedMasks()
        table = np.full((64, -(-VOCABULARY // 32)), -1, np.int32)
        worker.hosts_of = lambda *_: (table, self.masks.hosts)  # type: ignore[assignment]
        directory = miniature_directory(folder)
        model = ModelConfig("model", str(directory), load_format="random")
        self.config = EngineConfig(
            (model,), device="cpu", max_running=64, kv_cache_tokens=1 << 17, guided_graphs_first=True, max_waiting=512
        )
        torch.set_num_threads(1)
        address = f"ipc://{folder}/engine"
        names = [SUPERVISOR, *(f"api{index}" for index in range(PEERS))]
        self._peers = subprocess.Popen([sys.executable, "-c", PEER_PROCESS, address, *names], stdin=subprocess.PIPE)
        assert self._peers.stdin is not None
        (attach,) = wire.encode(Attach())
        self._peers.stdin.write((bytes(attach) + b"\n") * len(names))
        self._peers.stdin.close()
        self.channel = SharedChannel(address)
        observations = Observations()
        hidden = 0
        pool = Pool(lambda: hidden)
        chat = start.load_worker(self.config, model, pool.device, pool, observations)
        assert isinstance(chat, worker.ChatWorker)
        hidden = chat._runner._sizes.hidden_size
        chat.allocate(plan_pages(self.config, [chat], lambda: None)[chat.name])
        chat._outbox._keeps = True
        chat._vision._encoder = None  # type: ignore[assignment]
        self.worker = chat
        self.engine = loop.Engine([chat], pool, observations, self.channel)
        for runner in chat.graph_runners[1:]:
            while runner.capture_next(idle=True):
                pass
        self.engine._phase = "ready"
        self._asked = 0
        self._read = chat._read
        self._num_read = 0
        chat._read = self._counted  # type: ignore[method-assign]
        gc.collect()
        gc.freeze()

    def close(self) -> None:
        self._peers.kill()
        self._peers.wait()
        self.masks.process.kill()
        self.masks.process.wait()

    def ask(self, grammar: str) -> None:
        self._asked += 1
        name = f"request-{self._asked}"
        tokens = np.arange(10, 30, dtype=np.int32)
        positions = np.broadcast_to(np.arange(20, dtype=np.int32), (3, 20))
        sampling = SamplingParams(max_tokens=1400, temperature=1.0, seed=self._asked)
        self.channel._owners[name] = f"api{self._asked % PEERS}"
        prompt = Prompt(tokens, positions, 20)
        self.channel._commands.append(ChatRequest(name, "model", prompt, sampling, time.monotonic(), grammar))

    def abort_all(self) -> None:
        for number in range(1, self._asked + 1):
            self.worker.control(Abort(f"request-{number}"))
        while self.worker._in_flight:
            self.engine.turn()

    def warm_servers(self, grammar: str) -> None:
        self.ask(grammar)
        while not all(server.ready for server in self.worker._guidance._servers):
            self.engine.turn()
        self.abort_all()
        if len(processors := sorted(os.sched_getaffinity(0))) > 1:  # The engine's thread has one for itself.
            os.sched_setaffinity(0, processors[:1])
            for process in (self._peers.pid, self.masks.process.pid, os.getpid()):
                for thread in os.listdir(f"/proc/{process}/task"):
                    if int(thread) != os.getpid():
                        os.sched_setaffinity(int(thread), processors[1:])

    def _counted(self, **options: Any) -> None:
        self._num_read += 1
        self._read(**options)

    def steps(self, count: int) -> None:
        until = self._num_read + count
        while self._num_read < until:
            self.engine.turn()

    def measure(self, free: int, guided: int, grammar: str) -> list[dict[str, float]]:
        for row in range(free + guided):
            self.ask("" if row < free else grammar)
        while len(self.worker._scheduler.rows.slots) < free + guided:
            self.engine.turn()
        self.steps(WARM_UP)
        rows = [self._measure() for _ in range(PARTS)]
        self.abort_all()
        return rows

    def _measure(self) -> dict[str, float]:
        STAGES.reset()
        GPU.idle.clear()
        began = time.perf_counter()
        self.steps(STEPS)
        wall = time.perf_counter() - began
        STAGES.close()
        stages = {stage: 1e6 * seconds / STEPS for stage, seconds in STAGES.seconds.items()}
        row = {"step_us": 1e6 * wall / STEPS}
        row["host_us"] = sum(seconds for stage, seconds in stages.items() if not stage.startswith("wait_"))
        row |= {f"idle_before_{kind}_us": 1e6 * seconds / STEPS for kind, seconds in GPU.idle.items()}
        return row | {f"{stage}_us": seconds for stage, seconds in sorted(stages.items())}


def measured(simulation: Simulation, rounds: int) -> Iterator[tuple[Row, dict[str, Any]]]:
    grammar = json_schema_grammar(invoice())
    simulation.warm_servers(grammar)
    for scale in SCALES:
        GPU.scale = scale
        simulation.masks.take(scale * MASKS)
        found: dict[str, list[dict[str, float]]] = defaultdict(list)
        for _ in range(rounds):
            for load, (free, guided) in LOADS.items():
                found[load] += simulation.measure(free, guided, grammar)
        lows: dict[str, dict[str, float]] = {}
        for load, rows in found.items():
            names = dict.fromkeys(name for row in rows for name in row)
            lows[load] = {name: _low([row.get(name, 0.0) for row in rows]) for name in names}
        for load, low in lows.items():
            row: Row = {"layers_ms": 1e3 * scale * LAYERS, "rows": load}
            row |= {name: round(value, 1) for name, value in low.items()}
            if load in BESIDE:
                row["loss"] = 1 - lows[BESIDE[load]]["step_us"] / low["step_us"]
            yield row, {}


def _low(values: Sequence[float]) -> float:
    """The lower quartile: other work on the machine only adds."""
    return float(np.quantile(values, 0.25))


def main(words: Sequence[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.guided_path",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--name", default="guided_path", help="of the result")
    chosen = parser.parse_args(words)
    watch()
    with (
        tempfile.TemporaryDirectory() as folder,
        torch.inference_mode(),
        closing(Simulation(Path(folder))) as simulation,
    ):
        return record(chosen.name, measured(simulation, chosen.rounds), rounds=chosen.rounds)


if __name__ == "__main__":
    main()
