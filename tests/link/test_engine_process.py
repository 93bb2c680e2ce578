"""Engine processes: the first one is begun early, and how one ends."""

from __future__ import annotations

import asyncio
import os
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from service.link.config import EngineConfig, ModelConfig
from service.link.engine_link import SUPERVISOR, EngineProcess, EngineSocket, EngineStarts
from service.link.messages import Outputs, Stop
from service.system.children import python_command, python_environment
from tests.support.processes import ROOT
from tests.support.waiting import GENEROUS, until

PROGRAM = """
import os
from service.link.messages import EngineState, Outputs, Stop

def serve(config, channel):
    told = f"{os.getpid()} {os.getcwd()} {config.restarted} {config.models[0].name}"
    channel.send(Outputs(state=EngineState("ready", told, (), 0)))
    while not any(isinstance(command, Stop) for command in channel.receive(None)):
        pass
"""
CONFIG = EngineConfig((ModelConfig("model", "/nowhere"),), device="cpu")


@pytest.fixture(autouse=True)
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "entry_of_test.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    (gone := tmp_path / "release").mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()  # as where a release is replaced while its server runs


async def test_the_first_start_runs_in_the_process_that_was_begun_and_later_ones_are_restarts() -> None:
    starts, lives = EngineStarts(CONFIG, "entry_of_test:serve"), [list[str]() for _ in range(3)]
    await starts.begin()
    assert (begun := starts._begun) is not None
    for told in lives:

        def heard(outputs: Outputs, told: list[str] = told) -> None:
            assert outputs.state is not None
            told += outputs.state.detail.split()

        running = asyncio.create_task((link := starts.link()).run(heard))
        await until(partial(bool, told), what="the engine is ready")
        link.send(Stop())
        assert await running == "stopped"
    assert [life[1:] for life in lives] == [["/", restarted, "model"] for restarted in ("False", "True", "True")]
    pids = [int(pid) for pid, *_ in lives]
    assert pids[0] == begun.process.pid and len(set(pids)) == 3 and not Path(begun.directory.name).exists()


async def test_the_end_of_its_parent_ends_it() -> None:
    engine = await EngineProcess.start(CONFIG, "entry_of_test:serve")
    assert engine.process.stdin is not None
    await until(Path(engine.address.removeprefix("ipc://")).exists, what="the engine has bound its socket")
    engine.process.stdin.close()
    assert await engine.process.wait() == 0 and not Path(engine.directory.name).exists()


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
