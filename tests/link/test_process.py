"""The engine's process: the GPU's driver starts beside its imports, and its end waits for nothing."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import msgspec
import pytest

from service.link.config import EngineConfig, ModelConfig
from service.link.engine_link import SUPERVISOR, EngineSocket
from service.system.children import python_command, python_environment
from tests.support.processes import ROOT
from tests.support.waiting import GENEROUS

ENTRY = """
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
    (tmp_path / "entry_of_test.py").write_text(ENTRY)
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
