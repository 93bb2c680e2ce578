"""Engine processes: the standby that the next start runs in, and how one ends."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks.servers.footprint import inspect
from service.link import engine_link
from service.link.config import EngineConfig, ModelConfig
from service.link.engine_link import (
    ENTRY,
    STANDBY,
    SUPERVISOR,
    EngineSocket,
    ProcessLink,
    Standby,
    start_engine_process,
)
from service.link.messages import Outputs, Stop
from service.system.children import python_command, python_environment
from tests.support.processes import ROOT
from tests.support.waiting import GENEROUS, until

EMBEDDED = ROOT / "models" / "embedded"
PROGRAM = """
import os
from pathlib import Path
from service.link.messages import EngineState, Outputs, Stop

FOLDER = Path(__file__).parent

def prepare(config):
    (FOLDER / f"prepared {os.getpid()}").touch()

def serve(config, channel):
    told = f"{os.getpid()} {config.restarted} {config.stood_by} {config.models[0].name}"
    channel.send(Outputs(state=EngineState("ready", told, (), 0, device="a GPU")))
    while not any(isinstance(command, Stop) for command in channel.receive(None)):
        pass
"""
CONFIG = EngineConfig((ModelConfig("model", "/nowhere"),), device="cpu")


class Life:
    """One life of the engine of PROGRAM, ready."""

    def __init__(self, link: ProcessLink, running: asyncio.Task[str], told: str) -> None:
        self.link, self._running = link, running
        pid, *self.told = told.split()
        self.pid = int(pid)

    async def end(self) -> None:
        self.link.send(Stop())
        assert await self._running == "stopped"


Begin = Callable[[Standby | None], Awaitable[Life]]


@pytest.fixture
async def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Begin]:
    (tmp_path / "entry_of_test.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    monkeypatch.setattr(engine_link, "PREPARE_AFTER", 0.0)
    tasks = []

    async def beginning(standby: Standby | None) -> Life:
        link = ProcessLink(CONFIG, "entry_of_test:serve", standby=standby)
        told: list[str] = []

        def heard(outputs: Outputs) -> None:
            assert outputs.state is not None
            told.append(outputs.state.detail)

        running = asyncio.create_task(link.run(heard))
        tasks.append(running)
        await until(lambda: bool(told), what="the engine is ready")
        return Life(link, running, told[0])

    yield beginning
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def prepared(folder: Path) -> set[int]:
    """Processes that have prepared themselves and live."""
    pids = {int(file.name.split()[1]) for file in folder.glob("prepared *")}
    return {pid for pid in pids if inspect(pid) is not None}


async def test_each_restart_runs_in_the_standby_process(begin: Begin, tmp_path: Path) -> None:
    standby = Standby(CONFIG, "entry_of_test:serve")
    life = await begin(standby)
    assert life.told == ["False", "False", "model"]
    seen = {life.pid}
    for _ in range(2):
        await until(lambda: bool(prepared(tmp_path) - seen), what="another process is prepared")
        (waiting,) = prepared(tmp_path) - seen
        await life.end()
        life = await begin(standby)
        assert life.pid == waiting and life.told == ["True", "True", "model"]
        seen.add(waiting)
    await life.end()


@pytest.mark.slow
async def test_the_first_start_runs_in_the_standby_process(begin: Begin, tmp_path: Path) -> None:
    """Its age is part of the start, unlike that of a process that waited."""
    standby = Standby(CONFIG, "entry_of_test:serve")
    await standby.begin()
    await until(lambda: bool(prepared(tmp_path)), what="a process is prepared")
    (begun,) = prepared(tmp_path)
    life = await begin(standby)
    assert life.pid == begun and life.told == ["False", "False", "model"]
    await life.end()
    assert (await begin(None)).pid != begun


@pytest.mark.slow
async def test_an_engine_starts_although_its_standby_process_has_died(begin: Begin, tmp_path: Path) -> None:
    standby = Standby(CONFIG, "entry_of_test:serve")
    life = await begin(standby)
    await until(lambda: bool(prepared(tmp_path)), what="a process is prepared")
    (waiting,) = prepared(tmp_path)
    os.kill(waiting, signal.SIGKILL)
    await until(lambda: inspect(waiting) is None, what="it has died")
    await until(lambda: standby._process is None, what="that was noticed")
    await life.end()
    other = await begin(standby)
    assert other.pid not in (life.pid, waiting) and other.told[:2] == ["False", "False"]
    await other.end()


async def test_the_end_of_its_parent_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "entry_of_test.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    process = await start_engine_process(CONFIG, STANDBY, "entry_of_test:serve")
    assert process.stdin is not None
    process.stdin.close()
    assert await process.wait() == 0


PREPARED = """
import os, sys, torch
from pathlib import Path
from service.engine.start import prepare
from service.link.config import EngineConfig, ModelConfig

models = tuple(ModelConfig(name, str(Path(sys.argv[1]) / name)) for name in ("qwen2_vl", "voxcpm2"))
prepare(EngineConfig(models, restarted=True))
assert not torch.cuda.is_initialized()
assert not [fd for fd in os.listdir("/proc/self/fd") if "nvidia" in os.path.realpath(f"/proc/self/fd/{fd}")]
print(*(name for name in sys.modules if name.startswith(("models.", "service.engine.", "triton"))))
"""


@pytest.mark.slow
def test_a_standby_process_imports_what_an_engine_needs_and_opens_no_gpu() -> None:
    """Of the embedded models, beside an engine. Where there is no GPU, none can be opened."""
    command = [sys.executable, "-c", PREPARED, str(EMBEDDED)]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    imported = done.stdout.split()
    needed = {"models.qwen_vl.model", "models.voxcpm2.processor", "service.engine.chat.worker"}
    if find_spec("triton") is not None:
        needed |= {"triton", "models.layers.kernels.paged_decode"}
    assert needed <= set(imported)


async def test_an_engine_starts_in_a_deleted_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "release"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    process = await start_engine_process(CONFIG, STANDBY, ENTRY)
    try:
        assert os.readlink(f"/proc/{process.pid}/cwd") == "/"
    finally:
        process.kill()
        await process.wait()


PROGRAM_OF_TEST = """
import atexit, logging, sys, threading
from models.interfaces.errors import CheckpointError

def serve(config, channel):
    threading.Thread(target=threading.Event().wait).start()
    atexit.register(threading.Event().wait)
    logging.getLogger("reprise.engine").error("said last")
    print("printed last", end="")
    if config.models[0].name == "bad":
        raise CheckpointError("what is bad")
"""


@pytest.mark.parametrize(("model", "status", "said"), [("good", 0, "said last"), ("bad", 3, "what is bad")])
def test_an_engine_process_exits_without_its_threads(tmp_path: Any, model: str, status: int, said: str) -> None:
    """Of a thread and of a handler at exit that never end."""
    (tmp_path / "entry_of_test.py").write_text(PROGRAM_OF_TEST)
    config = EngineConfig((ModelConfig(model, "/nowhere"),), device="cpu")
    process = subprocess.Popen(
        python_command("service.link.process", f"ipc://{tmp_path}/engine", "entry_of_test:serve"),
        env=python_environment(os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    peer = EngineSocket(f"ipc://{tmp_path}/engine", SUPERVISOR)
    try:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(msgspec.json.encode(config) + b"\n")
        process.stdin.flush()
        # Standard input stays open: the end of the parent would end it, too.
        assert process.wait(GENEROUS) == status
        output = process.stdout.read().decode()
        assert said in output and "printed last" in output
    finally:
        process.kill()
        process.communicate()
        peer.close()
