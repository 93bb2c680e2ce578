"""Children of the server run its own code wherever it is started, and end in time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from service.cli.bench.run import CLIENT
from service.system.children import PACKAGE_ROOT, python_command, python_environment
from tests.support.processes import ROOT
from tests.support.slow import slow
from tests.support.waiting import GENEROUS

HOSTILE = ("models.py", "service/__init__.py", "torch.py", "numpy.py", "msgspec.py", "site.py")


@pytest.fixture
def hostile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with modules that leave a file behind when they are run."""
    folder = tmp_path / "project"
    for name in HOSTILE:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"open({str(tmp_path / 'was_run')!r}, 'w').close()\nraise RuntimeError('not ours')\n")
    monkeypatch.chdir(folder)
    return folder


def _check(hostile: Path) -> None:
    assert not (hostile.parent / "was_run").exists()


@pytest.mark.parametrize("python_path", [slow(None), slow(":"), "../project"])
def test_the_current_directory_is_no_path(hostile: Path, python_path: str | None) -> None:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if python_path is not None:
        environ["PYTHONPATH"] = python_path
    command = python_command("service.cli", "version")
    done = subprocess.run(command, env=python_environment(environ), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr
    _check(hostile)


@pytest.mark.slow
def test_a_path_that_was_named_stays_and_does_not_replace_the_packages(hostile: Path, tmp_path: Path) -> None:
    other = tmp_path / "named"
    (other / "service").mkdir(parents=True)
    for name in ("models.py", "service/__init__.py"):
        (other / name).write_text("raise RuntimeError('not ours')\n")
    (other / "theirs.py").write_text("print('theirs')\n")
    environ = python_environment({**os.environ, "PYTHONPATH": f":{other}:.:"})
    assert environ["PYTHONPATH"] == str(other)
    done = subprocess.run(python_command("theirs"), env=environ, capture_output=True, text=True, timeout=600)
    assert done.stdout == "theirs\n"

    code = "from reprise_server import main; main()"
    environ["PYTHONPATH"] = f"{other}:{PACKAGE_ROOT / 'deploy/install'}"
    command = [sys.executable, "-P", "-c", code, "serve", "--print-config", "--max-n", "3"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "max_n: 3" in done.stdout, done.stderr
    _check(hostile)


def test_every_child_is_started_by_the_one_command() -> None:
    assert python_command("service.cli.bench.client") == CLIENT
    sources = [path for path in (ROOT / "service").rglob("*.py") if path.name not in ("children.py", "packages.py")]
    assert not [path for path in sources if "sys.executable" in path.read_text()]


SPOKEN = "service.api.spoken_text.text_splitting, service.api.spoken_text.markup"


@pytest.mark.parametrize(
    ("modules", "missing"),
    [
        ("service.engine.chat.guided.mask_server, llguidance", "torch"),
        (f"service.media.loader, service.media.audio_out, service.media.decode_worker, {SPOKEN}", "torch"),
        slow("models.voxcpm2.processor", "torch"),
        slow("service.api.app, service.media.decode_worker", "av"),
    ],
)
def test_what_starts_often_or_computes_little_does_without_large_packages(modules: str, missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import {modules}"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=GENEROUS)


BUSY = """
import threading
from concurrent.futures import ThreadPoolExecutor

from service.system import children as exits

exits.EXIT_GRACE = 0.01
began = threading.Event()


def decode():
    began.set()
    threading.Event().wait()


ThreadPoolExecutor(1).submit(decode)
began.wait()
print("served", flush=True)
exits.end_soon(3)
"""

IDLE = """
import atexit

from service.system import children as exits

exits.EXIT_GRACE = 600.0
atexit.register(print, "tidied")
exits.end_soon(3)
"""


@pytest.mark.parametrize(("program", "ended"), [(BUSY, (3, "served\n")), (IDLE, (0, "tidied\n"))], ids=["busy", "idle"])
def test_a_process_ends_as_usual_unless_a_thread_goes_on(program: str, ended: tuple[int, str]) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=GENEROUS)
    assert (done.returncode, done.stdout) == ended


CTRL_C = """
import signal, sys, weakref

from service.system.children import ended_by_ctrl_c


class Module:
    pass


if sys.argv[1] == "ignored":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
module = Module()
reference = weakref.ref(module, lambda _: signal.raise_signal(signal.SIGINT))
with ended_by_ctrl_c():
    del module
print("goes on")
"""


@pytest.mark.parametrize(("how", "status", "says"), [("heeded", 130, ""), ("ignored", 0, "goes on\n")])
def test_ctrl_c_during_an_import_ends_the_process_unless_ignored(how: str, status: int, says: str) -> None:
    done = subprocess.run([sys.executable, "-c", CTRL_C, how], capture_output=True, text=True, timeout=GENEROUS)
    assert (done.returncode, done.stdout, done.stderr) == (status, says, "")
