"""Fixtures of the whole suite."""

from __future__ import annotations

import gc
import inspect
import logging
import os
import re
import signal
from collections.abc import Generator, Iterator
from functools import cache
from pathlib import Path

# Before torch is imported: one thread for each of the processes that share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import httpx
import pytest
import torch
from httpx._transports import default as transports
from hypothesis import HealthCheck, settings

from tests.support.interpreter import quicken
from tests.support.processes import ServerProcess, served
from tests.support.waiting import GENEROUS

if not torch.cuda.is_available():
    # Triton reads it at import, and which test imports it first varies.
    os.environ["TRITON_INTERPRET"] = "1"

# Before typer is imported: colors that the environment forces, as some CI does, and the width of a narrow terminal
# would break what commands print into pieces.
for name in ("FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS"):
    os.environ.pop(name, None)
# A proxy is not asked for servers of this machine.
for name in ("NO_PROXY", "no_proxy"):
    os.environ[name] = ",".join(filter(None, (os.environ.get(name), "127.0.0.1", "localhost")))

# Without a GPU torch.manual_seed would keep the stack of each call for the start of one, in nearly a millisecond.
SEED = torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed

# A script that runs the suite in the background has Ctrl-C ignored, which commands that tests interrupt would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# No example and no choice of one may fail for taking long.
settings.register_profile(
    "any machine",
    settings.default,
    deadline=None,
    max_examples=50,
    suppress_health_check=[*settings.default.suppress_health_check, HealthCheck.too_slow],
)
settings.load_profile("any machine")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What has been imported and collected lives to the end: the garbage collector need not look through it, neither
    meanwhile nor later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file of slow tests alone is not even imported where none of them runs: it would import in each process."""
    if collection_path.suffix != ".py" or "not slow" not in config.option.markexpr:
        return None
    return bool(re.search(r"^pytestmark = .*\bmark\.slow", collection_path.read_text(), re.MULTILINE)) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that may take long go first: at the end one process would work and the others wait."""
    items.sort(key=lambda item: item.get_closest_marker("timeout") is None)


@pytest.fixture(scope="session", autouse=True)
def patient_clients() -> None:
    """A request that names no timeout has GENEROUS: the 5 s of httpx pass on a machine that is busy. All its functions
    and clients share one object as their default. Each request by a function of httpx, and each client, would read the
    certificate authorities of the world anew, in 25 ms: they share those too."""
    default = inspect.signature(httpx.get).parameters["timeout"].default
    default.connect = default.read = default.write = default.pool = GENEROUS
    transports.create_ssl_context = cache(transports.create_ssl_context)


@pytest.fixture(scope="session", autouse=True)
def voices_of_tests(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Servers and commands keep voices away from those of the person who runs the tests."""
    os.environ["REPRISE_VOICES_DIR"] = str(tmp_path_factory.mktemp("voices"))


@pytest.fixture(autouse=True)
def same_handlers() -> Iterator[None]:
    """Commands that run in this process set the log up for good."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = [handler for handler in root.handlers if handler in handlers]
    root.setLevel(level)


@pytest.fixture(scope="session")
def embedded_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """`reprise serve` with the models of the package, in a process of its own."""
    with served("--max-frames", "16", HOME=str(tmp_path_factory.mktemp("home"))) as running:
        yield running


@pytest.fixture(params=["interpreter", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where a Triton kernel runs: on a GPU, or on the CPU in Triton's interpreter."""
    if request.param == "cuda":
        return torch.device("cuda")
    if torch.cuda.is_available():
        pytest.skip("the interpreter is chosen when Triton is imported; here it compiles for the GPU")
    quicken()
    return torch.device("cpu")


@pytest.fixture(autouse=True)
def same_numbers() -> None:
    """A limit on rounding errors holds for the drawn numbers; another run is to draw the same, whatever ran before."""
    SEED(1)


@pytest.fixture(autouse=True)
def engine_stream(request: pytest.FixtureRequest) -> Iterator[None]:
    """GPU tests run on a stream of their own, as the engine does: graphs cannot be captured on the default one."""
    if request.node.get_closest_marker("gpu") is None:
        yield
        return
    if not torch.cuda.is_available():
        pytest.fail("a test marked gpu needs a CUDA device")
    with torch.cuda.stream(torch.cuda.Stream()):
        yield
