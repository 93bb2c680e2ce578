"""Mask servers in processes of their own."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from models.qwen_vl.processor import load_processor
from service.engine.chat.guided import guidance as guidance_module
from service.engine.chat.guided.guidance import Guidance, MaskProcess, MaskThread, SharedMasks, hosts_of
from service.engine.chat.guided.mask_server import BROKEN
from service.hub import EMBEDDED
from service.link.config import EngineConfig, ModelConfig
from service.system.children import PACKAGE_ROOT
from tests.engine.chat.test_masks import Sequence, built, guided
from tests.engine.chat.test_masks import shared_at_once as shared_at_once
from tests.support.grammars import with_all_servers
from tests.support.processes import stand_still

DIRECTORY = EMBEDDED / "qwen2_vl"
PROCESSOR = load_processor(DIRECTORY)
WORDS = -(-PROCESSOR.vocab_size // 32)
CONFIG = EngineConfig(models=(ModelConfig("sees", str(DIRECTORY)),), max_running=3)

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="processes share masks on Linux alone")


@pytest.fixture
def shared() -> SharedMasks:
    return SharedMasks(3, WORDS)


@pytest.fixture
def processes(shared: SharedMasks) -> Iterator[list[MaskProcess]]:
    yield [MaskProcess(str(DIRECTORY), PROCESSOR.vocab_size, shared, CONFIG) for _ in range(2)]


def computed(guidance: Guidance, *sequences: Sequence) -> tuple[list[int], dict[int, str]]:
    """Places of their masks, verdicts."""
    job = guidance.masks(sequences, [[] for _ in sequences])
    while not job.done:
        job.wait()
    return job.rows.tolist(), job.verdicts


def allowed(masks: np.ndarray, text: str) -> bool:
    """Whether a mask allows the first token of a text."""
    token = PROCESSOR.tokenize(text)[0]
    return bool(masks[token // 32] >> (token % 32) & 1)


def test_two_processes_share_the_rows_of_a_step(shared: SharedMasks, processes: list[MaskProcess]) -> None:
    guidance = with_all_servers(Guidance(processes))
    rows = [guided(guidance, "zebra quilt"), guided(guidance, "violin"), guided(guidance, "zebra")]
    built(guidance, *rows)
    places, verdicts = computed(guidance, *rows)
    assert places == [1, 3, 2] and not verdicts
    following = [[allowed(shared.masks[place - 1], letter) for letter in "zqv"] for place in places]
    assert following == [[True, True, False], [False, False, True], [True, False, False]]


def started(host: MaskProcess) -> tuple[Guidance, Sequence, subprocess.Popen[bytes]]:
    """With a matcher."""
    guidance = Guidance([host])
    sequence = guided(guidance, "zebra")
    built(guidance, sequence)
    assert host._process is not None
    return guidance, sequence, host._process


def test_a_process_that_was_killed_is_started_anew(shared: SharedMasks, processes: list[MaskProcess]) -> None:
    guidance, lost, process = started(processes[0])
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert computed(guidance, lost) == ([1], {0: BROKEN})
    other = guided(guidance, "violin")
    built(guidance, other)
    assert computed(guidance, other) == ([1], {}) and allowed(shared.masks[0], "v")


@pytest.mark.slow
def test_a_process_that_computes_for_ever_is_killed(
    processes: list[MaskProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    guidance, stuck, process = started(processes[0])
    stand_still(process.pid)
    monkeypatch.setattr(guidance_module, "_LONGEST_COMPUTATION", 0.0)
    assert computed(guidance, stuck) == ([1], {0: BROKEN})
    assert process.poll() == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("given_up", [False, True])
def test_a_process_that_builds_for_ever_is_killed_and_another_one_goes_on(
    shared: SharedMasks, processes: list[MaskProcess], monkeypatch: pytest.MonkeyPatch, given_up: bool
) -> None:
    """given_up: its client has left, and nobody waited for it any more."""
    guidance, _, process = started(processes[0])
    stand_still(process.pid)
    stuck = guided(guidance, "quilt")
    assert stuck.guide is not None and guidance.building
    if given_up:
        guidance.forget(stuck.guide)
    with monkeypatch.context() as patch:
        patch.setattr(guidance_module, "_LONGEST_BUILD", 0.0)
        guidance.receive(0.0)
    assert process.poll() == -signal.SIGKILL and not guidance.building
    assert given_up or (stuck.guide.built and stuck.guide.problem == BROKEN)
    other = guided(guidance, "violin")
    built(guidance, other)
    assert computed(guidance, other) == ([1], {}) and allowed(shared.masks[0], "v")


@pytest.mark.slow
def test_nothing_of_them_is_left(shared: SharedMasks, processes: list[MaskProcess]) -> None:
    guidance = with_all_servers(Guidance(processes))
    running, links = [host._process for host in processes], [server.link for server in guidance._servers]
    processes.clear()
    del guidance
    gc.collect()
    assert all(process is not None and process.returncode is not None for process in running)
    assert all(link is not None and link.closed for link in links)


def test_processes_are_for_gpus_and_for_models_with_a_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    def hosts(name: str, device: str, processors: int, sharers: int = 1) -> list[type]:
        monkeypatch.setattr("models.interfaces.cpus.available", lambda: processors)
        config = EngineConfig(models=CONFIG.models, sharers=sharers)
        masks, found = hosts_of(name, PROCESSOR, PROCESSOR.vocab_size, config, device)
        assert masks.shape == (config.slots, WORDS) and not masks.any()
        return [type(host) for host in found]

    assert hosts("sees", "cpu", 64) == hosts("other", "cuda", 64) == [MaskThread]
    assert hosts("sees", "cuda", 64) == [MaskProcess] * 4
    assert hosts("sees", "cuda", 64, sharers=8) == [MaskProcess] * 2
    assert hosts("sees", "cuda", 2) == [MaskProcess]


def test_matchers_are_built_without_torch() -> None:
    """A process that does nothing but compute masks is small and starts fast."""
    program = (
        "import service.engine.chat.guided.matchers, sys; print('torch' in sys.modules, 'llguidance' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=PACKAGE_ROOT)
    assert run.stdout.split() == ["False", "True"]
