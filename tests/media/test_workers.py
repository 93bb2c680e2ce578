"""Workers that decode: limits of memory and time, cancellation, and workers that die."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from benchmarks.servers.footprint import inspect
from models.interfaces.errors import InputError
from service.confined.channel import WorkerChannel
from service.confined.workers import WorkerLimits, WorkerLost, WorkerPool, _environment
from service.media.loader import decode_audio, decode_workers
from service.media.messages import AudioLimits, DecodeAudio
from tests.media.samples import sound, tone
from tests.support.processes import stand_still
from tests.support.waiting import until

MIB = 1 << 20
CLIP = sound(tone(440, 8000), 8000, "WAV")


@pytest.fixture
async def make_pool() -> AsyncIterator[Callable[[WorkerLimits], WorkerPool]]:
    pools: list[WorkerPool] = []

    def make(limits: WorkerLimits, size: int = 1) -> WorkerPool:
        pools.append(decode_workers(size, limits))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


async def works(pool: WorkerPool) -> bool:
    samples = await decode_audio(pool, CLIP, sample_rate=8000, field="f", limits=AudioLimits())
    return samples.size == 8000


def idle_pid(pool: WorkerPool) -> int:
    return pool._idle[-1].pid


async def test_memory_limit(make_pool) -> None:
    """The data alone is more than the worker may hold."""
    pool = make_pool(WorkerLimits(memory_bytes=640 * MIB))
    with pytest.raises(WorkerLost):
        await pool.run(lambda channel: _send_and_wait(channel, bytes(700 * MIB)))
    assert pool.workers_lost == 1
    assert await works(pool)


def _send_and_wait(channel: WorkerChannel, data: bytes) -> None:
    channel.send(DecodeAudio("f", 8000, AudioLimits()), data)
    channel.receive()


async def test_a_job_has_its_own_cpu_limit(make_pool) -> None:
    pool = make_pool(WorkerLimits(cpu_seconds=1234))
    assert await works(pool)
    soft, hard = resource.prlimit(idle_pid(pool), resource.RLIMIT_CPU)
    assert soft > 1234
    assert hard == resource.RLIM_INFINITY  # the next job's limit may be later


@pytest.mark.slow
def test_the_cpu_limit_ends_a_process() -> None:
    code = "from service.confined.channel import allow_cpu; allow_cpu(0)\nwhile True: pass"
    spinning = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False)
    assert spinning.returncode == -signal.SIGXCPU


@pytest.mark.slow
def test_limits_stay_below_those_of_the_server() -> None:
    """Only root can raise a hard limit, as of `ulimit` or a batch system."""
    code = (
        "from resource import *; kinds = RLIMIT_AS, RLIMIT_NOFILE, RLIMIT_CPU;"
        "[setrlimit(kind, (most, most)) for kind, most in zip(kinds, (2 << 30, 40, 1000))];"
        "from service.confined.channel import allow_cpu, confine; confine(3 << 30); allow_cpu(2000);"
        "print(*map(getrlimit, kinds))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == f"({2 << 30}, {2 << 30}) (40, 40) (1000, 1000)"


async def test_a_worker_beyond_its_cpu_limit(make_pool, caplog: pytest.LogCaptureFixture) -> None:
    """It is stopped before its job, so that the signal comes while the job waits for it, however fast it is."""
    pool = make_pool(WorkerLimits())
    assert await works(pool)
    pid = idle_pid(pool)
    stand_still(pid)
    decoding = asyncio.ensure_future(decode_audio(pool, CLIP, sample_rate=8000, field="f", limits=AudioLimits()))
    await until(lambda: not pool._idle, what="the job has begun")
    os.kill(pid, signal.SIGXCPU)
    os.kill(pid, signal.SIGCONT)
    with pytest.raises(InputError, match="more memory or time"):
        await decoding
    assert pool.workers_lost == 1
    assert await works(pool)
    (warning,) = caplog.messages
    assert f"decode_worker {pid} died" in warning


@pytest.mark.slow
async def test_wall_limit(make_pool) -> None:
    """Of the one worker that never has an answer; the others have time enough for theirs on any machine."""
    pool = make_pool(WorkerLimits())
    assert await works(pool)
    pool._idle[-1]._limits = WorkerLimits(wall_seconds=1.0)
    begin = time.monotonic()
    with pytest.raises(WorkerLost):
        await pool.run(lambda channel: channel.receive())  # the worker waits for a job
    assert time.monotonic() - begin > 0.9
    assert await works(pool)


async def stuck(pool: WorkerPool) -> asyncio.Future[None]:
    """A job under way that would never end."""
    begun = threading.Event()

    def job(channel: WorkerChannel) -> None:
        begun.set()
        channel.receive()

    task = asyncio.ensure_future(pool.run(job))
    await until(begun.is_set, what="the job has begun")
    return task


async def test_cancellation_kills_the_worker_and_frees_the_slot(make_pool, caplog: pytest.LogCaptureFixture) -> None:
    pool = make_pool(WorkerLimits())
    assert await works(pool)
    pid = idle_pid(pool)
    task = await stuck(pool)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await works(pool)
    assert not Path(f"/proc/{pid}").exists()
    assert pool.workers_lost == 1 and not caplog.messages


async def test_a_worker_that_died_while_idle_is_replaced(make_pool, caplog: pytest.LogCaptureFixture) -> None:
    pool = make_pool(WorkerLimits())
    assert await works(pool)
    pid = idle_pid(pool)
    os.kill(pid, signal.SIGKILL)
    await until(lambda: inspect(pid) is None, what="the worker is dead")
    assert await works(pool)
    (warning,) = caplog.messages
    assert f"decode_worker {pid} died" in warning


def test_secrets_stay_out_of_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPRISE_API_KEYS", "secret")
    assert "secret" not in " ".join(_environment().values())


def namespaces_allowed() -> bool:
    """Whether a process like a worker may leave the network, tried in one of its own."""
    code = """
import ctypes, sys
libc = ctypes.CDLL(None)
sys.exit(0 if libc.unshare(0x40000000) == 0 or libc.unshare(0x50000000) == 0 else 1)
"""
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_a_worker_gives_up_privileges_files_and_the_network(make_pool) -> None:
    pool = make_pool(WorkerLimits())
    assert await works(pool)
    process = Path(f"/proc/{idle_pid(pool)}")
    assert "NoNewPrivs:\t1" in (process / "status").read_text()
    limits = {line[:25].strip(): line[25:].split()[:2] for line in (process / "limits").read_text().splitlines()}
    assert limits["Max open files"] == ["64", "64"]
    assert limits["Max file size"] == limits["Max core file size"] == ["0", "0"]
    if os.geteuid() == 0:  # a process that cannot be dumped hides its descriptors from others than root
        assert len(list((process / "fd").iterdir())) < 10
        left = os.readlink(process / "ns/net") != os.readlink("/proc/self/ns/net")
        assert left == namespaces_allowed()
