"""Several API processes of which one is killed or hangs: others go on, and another one takes its place."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import pytest

from tests.support.api_processes import api_pids, only
from tests.support.processes import served, stand_still
from tests.support.victims import CHAT, Listener, Patient, endless, small_and_endless
from tests.support.waiting import GENEROUS, wait

pytestmark = pytest.mark.slow
HUNG_AFTER = "30"
"""Seconds: longer than the other process has to stand still while a stream begins."""
RUNNING = f'reprise_requests_running{{model="{CHAT}"}}'
OK = f'reprise_requests_total{{endpoint="chat",model="{CHAT}",outcome="ok",status="200"}}'


def each(target: Patient, path: str) -> list[dict[str, object]]:
    """What each API process says of itself."""
    found = []
    for pid in api_pids(target.pid):
        with only(pid, target.pid):
            found.append(httpx.get(target.url + path, headers={"connection": "close"}, timeout=GENEROUS).json())
    return found


def wait_whole(target: Patient) -> None:
    """Until both API processes accept connections and their engine is ready."""
    wait(lambda: len(api_pids(target.pid)) == 2, what="there are two")
    wait(lambda: [said["status"] for said in each(target, "/ready")] == ["ready"] * 2, 2 * GENEROUS, "both are ready")


def stream_on(target: Patient, pid: int) -> Listener:
    """An endless stream that this API process answers."""
    with only(pid, target.pid):
        stream = Listener(target, "/v1/chat/completions", endless())
        assert stream.begun.wait(GENEROUS) and stream.status == 200
    return stream


@pytest.mark.parametrize(("end", "hang_timeout"), [("killed", "600"), ("hung", HUNG_AFTER)])
def test_an_api_process_takes_its_own_requests_alone(tmp_path: Path, end: str, hang_timeout: str) -> None:
    limits = ("--hang-timeout", hang_timeout, "--max-in-flight", "4", "--drain-timeout", "1")
    with served(*small_and_endless(tmp_path), "--api-processes", "2", *limits) as server:
        target = Patient(server, tmp_path)
        wait_whole(target)
        answer, counted = target.ask(), target.metric(OK)
        doomed, other = api_pids(target.pid)
        lost, kept = [stream_on(target, doomed) for _ in range(2)], stream_on(target, other)
        wait(lambda: target.metric(RUNNING) == 3, what="all three run")
        if end == "killed":
            os.kill(doomed, signal.SIGKILL)
        else:
            stand_still(doomed)
        for stream in lost:
            stream.join(3 * GENEROUS)
            assert stream.cut
        wait(lambda: target.metric(RUNNING) == 1, what="the engine has ended what nobody waits for")
        kept.goes_on()
        assert target.ask() == answer  # also of the limits: three of four places were taken
        wait(lambda: target.metric(OK) >= counted + 1, what="the answer is counted")
        wait_whole(target)
        assert doomed not in api_pids(target.pid) and other in api_pids(target.pid)
        wait(lambda: target.metric("reprise_api_process_restarts_total") == 1, what="it is counted")
        assert ("no sign of life" in "".join(server.log)) == (end == "hung")
        for pid in api_pids(target.pid):
            with only(pid, target.pid):
                assert target.ask() == answer
        kept.goes_on()
        os.kill(other, signal.SIGKILL)
        kept.join(GENEROUS)
        wait_whole(target)
        wait(lambda: target.metric(RUNNING) == 0, what="nothing runs")
        assert target.ask() == answer
