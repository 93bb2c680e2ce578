"""The real server in a process of its own, started for a benchmark."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOOPBACK = "127.0.0.1"
PORTS = range(20_000, 30_000)
"""Below the kernel's ephemeral ports, and between the ports of Ray's workers and of its replicas."""
START_TIMEOUT = 600.0
ANSWER_TIMEOUT = STOP_TIMEOUT = 120.0
SETTLED = 3.0
"""Seconds without a new capture, after which there is no more to come."""
IDLE_SHARE = 0.2
"""Of a processor, which the engine uses at most when it has nothing to do."""
IDLE_SECONDS = 120.0
"""The longest wait for that."""


@dataclass(frozen=True)
class Server:
    """url: base address. ready_seconds: from the start of the process to the first 200 of /ready."""

    url: str
    ready_seconds: float
    log: Path
    pid: int

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples of a metric whose labels include these."""
        total = 0.0
        for line in self._get("/metrics").decode().splitlines():
            match = re.fullmatch(rf"{name}(?:{{(.*)}})? (\S+)", line)
            if match and all(f'{key}="{value}"' in (match[1] or "") for key, value in labels.items()):
                total += float(match[2])
        return total

    def samples(self, name: str, *labels: str) -> dict[str, float]:
        """Sums of a metric by the values of these labels, joined with spaces."""
        sums: dict[str, float] = {}
        for line in self._get("/metrics").decode().splitlines():
            match = re.fullmatch(rf"{name}{{(.*)}} (\S+)", line)
            if match:
                values = dict(re.findall(r'(\w+)="([^"]*)"', match[1]))
                key = " ".join(values[label] for label in labels)
                sums[key] = sums.get(key, 0.0) + float(match[2])
        return sums

    def facts(self) -> dict[str, Any]:
        """What a result says of the server that gave it: steps by kind and route, hits of every cache, memory."""
        return {
            "ready_seconds": self.ready_seconds,
            "steps": self.samples("reprise_steps_total", "kind", "route", "reason"),
            "captures": self.samples("reprise_graph_captures_total", "kind", "outcome"),
            "encoder_cache_hits": self.metric("reprise_encoder_cache_hits_total"),
            "encoder_cache_misses": self.metric("reprise_encoder_cache_misses_total"),
            "prefix_cache_hit_tokens": self.metric("reprise_prefix_cache_hit_tokens_total"),
            "preemptions": self.metric("reprise_preemptions_total"),
            "audio_streams": self.samples("reprise_audio_streams_total", "underrun"),
            "graph_bytes": self.metric("reprise_graph_bytes"),
            "gpu_memory_bytes": self.samples("reprise_gpu_memory_bytes", "state"),
            "gpu_used_bytes": gpu_used_bytes(),
        }

    def captures(self) -> int:
        return int(self.metric("reprise_graph_captures_total", outcome="captured"))

    def wait_for_captures(self) -> float:
        """Waits until an idle server has captured its graphs; when the last one was seen, on the monotonic clock."""
        last, captures = time.monotonic(), self.captures()
        while time.monotonic() - last < SETTLED:
            time.sleep(0.25)
            if (now := self.captures()) != captures:
                captures, last = now, time.monotonic()
        return last

    def wait_until_idle(self) -> None:
        """Waits for captures, and for what an idle server does behind them: warm-ups, the voices that are built in. The
        first requests would wait for it."""
        self.wait_for_captures()
        deadline, used = time.monotonic() + IDLE_SECONDS, self.metric("reprise_engine_cpu_seconds_total")
        while time.monotonic() < deadline:
            time.sleep(SETTLED)
            before, used = used, self.metric("reprise_engine_cpu_seconds_total")
            if used - before < IDLE_SHARE * SETTLED:
                return
        print(f"the engine is not idle after {IDLE_SECONDS:g} s", flush=True)

    def models(self) -> list[str]:
        return [card["id"] for card in json.loads(self._get("/v1/models"))["data"]]

    def _get(self, path: str) -> bytes:
        with urllib.request.urlopen(self.url + path, timeout=ANSWER_TIMEOUT) as response:
            return bytes(response.read())


@contextmanager
def reserved_port() -> Iterator[int]:
    """A TCP port of loopback for a program that is started within, and binds it late. Until the end nobody else gets it
    from here, in no process: the UDP port of its number says that it is taken."""
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket(type=socket.SOCK_DGRAM) as claim:
            try:
                claim.bind((LOOPBACK, port))
                with socket.socket() as probe:
                    probe.bind((LOOPBACK, port))
            except OSError:
                continue
            yield port
            return
    raise OSError(f"no port of {PORTS} is free")


@contextmanager
def serve(
    *flags: str,
    environment: dict[str, str] | None = None,
    program: Sequence[str] = ("service.cli", "serve"),
    ready: str = "/ready",
) -> Iterator[Server]:
    """`reprise serve` with these flags on a free loopback port; SIGTERM at the end. Its log stays where what is done
    with it fails. program: a module that does the same otherwise, and its first arguments. ready: path that answers
    200 once it serves."""
    with reserved_port() as port:
        sink, name = tempfile.mkstemp(prefix="reprise-", suffix=".log")
        log = Path(name)
        command = [sys.executable, "-m", *program, "--port", str(port), *flags]
        began, done = time.monotonic(), False
        try:
            environ = {**os.environ, **(environment or {})}
            process = subprocess.Popen(command, stdout=sink, stderr=subprocess.STDOUT, env=environ)
        finally:
            os.close(sink)
        try:
            url = f"http://{LOOPBACK}:{port}"
            _wait(process, url + ready, log)
            yield Server(url, time.monotonic() - began, log, process.pid)
            done = True
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_TIMEOUT)
            except subprocess.TimeoutExpired:
                process.kill()
            if done:
                log.unlink(missing_ok=True)


def gpu_used_bytes() -> int | None:
    """Of the first GPU that programs here are shown, all processes together; None without one."""
    if shutil.which("nvidia-smi") is None:
        return None
    first = (os.environ.get("CUDA_VISIBLE_DEVICES") or "0").split(",")[0]
    query = ["nvidia-smi", f"--id={first}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    return int(done.stdout) << 20 if done.returncode == 0 else None


def _wait(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT
    while time.monotonic() < deadline:
        if process.poll() is not None:
            break
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.05)
    raise RuntimeError(f"the server did not become ready:\n{log.read_text()[-4000:]}")


def random_weights(directories: Sequence[Path]) -> list[str]:
    """Flags that host these directories with random weights under their folder names."""
    flags = ["--load-format", "random"]
    for directory in directories:
        flags += ["--model", str(directory)]
    names = [directory.name if len(directories) == 1 else f"{directory}={directory.name}" for directory in directories]
    for name in names:
        flags += ["--served-model-name", name]
    return flags
