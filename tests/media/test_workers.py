from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import msgspec
import pytest

from models.errors import InputError
from service.media.audio_in import decode_audio
from service.media.channel import Channel, DecodeAudio, Refused
from service.media.limits import AudioLimits, WorkerLimits
from service.media.workers import WorkerLost, WorkerPool, _environment
from tests.media.samples import sound, tone

MIB = 1 << 20
CLIP = sound(tone(440, 8000), 8000, "WAV")


@pytest.fixture
async def make_pool() -> AsyncIterator[Callable[[WorkerLimits], WorkerPool]]:
    pools: list[WorkerPool] = []

    def make(limits: WorkerLimits, size: int = 1) -> WorkerPool:
        pools.append(WorkerPool(size, limits))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


async def works(pool: WorkerPool) -> bool:
    samples = await decode_audio(pool, CLIP, sample_rate=8000, field="f", limits=AudioLimits())
    return samples.size == 8000


def idle_pid(pool: WorkerPool) -> int:
    return pool._idle[-1].pid


async def test_a_worker_serves_many_jobs(make_pool) -> None:
    pool = make_pool(WorkerLimits())
    pool.start()
    first = idle_pid(pool)
    for _ in range(3):
        assert await works(pool)
    assert idle_pid(pool) == first
    assert pool.workers_lost == 0


async def test_memory_limit(make_pool) -> None:
    """The data alone is more than the worker may hold."""
    pool = make_pool(WorkerLimits(memory_bytes=640 * MIB))
    with pytest.raises(WorkerLost):
        await pool.run(lambda channel: _send_and_wait(channel, bytes(700 * MIB)))
    assert pool.workers_lost == 1
    assert await works(pool)


def _send_and_wait(channel: Channel, data: bytes) -> None:
    channel.send(DecodeAudio("f", 8000, AudioLimits()), data)
    channel.receive()


async def test_cpu_limit(make_pool) -> None:
    """A minute at a rate without a divisor in common with the asked one takes seconds to resample."""
    pool = make_pool(WorkerLimits(cpu_seconds=0))
    clip = sound(tone(440, 191_999, 59.0), 191_999, "WAV")
    with pytest.raises(InputError, match="more memory or time"):
        await decode_audio(pool, clip, sample_rate=16_000, field="f", limits=AudioLimits())
    assert pool.workers_lost == 1
    assert await works(pool)


async def test_wall_limit(make_pool) -> None:
    pool = make_pool(WorkerLimits(wall_seconds=1.5))
    assert await works(pool)
    begin = time.monotonic()
    with pytest.raises(WorkerLost):
        await pool.run(lambda channel: channel.receive())  # the worker waits for a job
    assert 1.4 < time.monotonic() - begin < 5
    assert await works(pool)


async def test_cancellation_kills_the_worker_and_frees_the_slot(make_pool) -> None:
    pool = make_pool(WorkerLimits())
    assert await works(pool)
    pid = idle_pid(pool)
    task = asyncio.ensure_future(pool.run(lambda channel: channel.receive()))
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await works(pool)
    assert not Path(f"/proc/{pid}").exists()
    assert pool.workers_lost == 1


async def test_closing_ends_jobs_under_way(make_pool) -> None:
    pool = make_pool(WorkerLimits())
    task = asyncio.ensure_future(pool.run(lambda channel: channel.receive()))
    await asyncio.sleep(0.2)
    begin = time.monotonic()
    pool.close()
    with pytest.raises(WorkerLost):
        await task
    assert time.monotonic() - begin < 5


async def test_a_worker_that_died_while_idle_is_replaced(make_pool) -> None:
    pool = make_pool(WorkerLimits())
    pool.start()
    os.kill(idle_pid(pool), 9)
    await asyncio.sleep(0.1)
    assert await works(pool)


async def test_a_refusal_keeps_the_worker(make_pool) -> None:
    pool = make_pool(WorkerLimits())
    with pytest.raises(InputError):
        await decode_audio(pool, b"nothing", sample_rate=8000, field="f", limits=AudioLimits())
    assert await works(pool)
    assert pool.workers_lost == 0


async def test_jobs_wait_for_a_worker(make_pool) -> None:
    pool = make_pool(WorkerLimits(), 2)
    assert all(await asyncio.gather(*(works(pool) for _ in range(6))))


async def test_a_worker_that_talks_nonsense_is_lost(make_pool) -> None:
    """It answers an opened video where a refusal is all that is understood."""
    pool = make_pool(WorkerLimits())

    def job(channel: Channel) -> None:
        channel._decoder = msgspec.msgpack.Decoder(Refused)
        _send_and_wait(channel, CLIP)

    with pytest.raises(WorkerLost):
        await pool.run(job)
    assert await works(pool)


def test_secrets_stay_out_of_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPRISE_API_KEYS", "secret")
    assert "secret" not in " ".join(_environment().values())


def test_workers_find_the_packages_that_the_server_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "one:two")
    assert _environment()["PYTHONPATH"].split(os.pathsep)[1:] == ["one", "two"]
    monkeypatch.delenv("PYTHONPATH")
    assert os.pathsep not in _environment()["PYTHONPATH"]


def test_media_needs_no_torch() -> None:
    modules = "service.media.loader, service.media.audio_out, service.media.decode_worker, service.text.splitting"
    code = f"import sys, {modules}, service.text.cleaning; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], check=False).returncode == 0
