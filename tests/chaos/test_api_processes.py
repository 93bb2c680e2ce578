"""Several API processes of which one is killed, their engine killed, and their end: nothing is left, others go on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from benchmarks.servers.footprint import children, engine_pid
from tests.support.api_processes import api_pids, only
from tests.support.processes import served, stand_still
from tests.support.victims import CHAT, SMALL, Listener, Patient, chat, endless, small_and_endless, speech
from tests.support.waiting import GENEROUS, wait

pytestmark = pytest.mark.slow
TWO = ("--api-processes", "2", "--hang-timeout", "600")
"""Processes are stopped for as long as a test needs."""
HUNG_AFTER = 30.0
"""Longer than the other process has to stand still while a stream begins."""
IN_PROGRESS = [f'reprise_http_requests_in_progress{{endpoint="{endpoint}"}}' for endpoint in ("chat", "speech")]
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


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Patient]:
    models = small_and_endless(tmp_path_factory.mktemp("models"))
    with served(*models, *TWO, "--max-in-flight", "4", "--drain-timeout", "1") as server:
        yield Patient(server, tmp_path_factory.mktemp("tmp"))


def test_a_killed_api_process_takes_its_own_requests_alone(target: Patient) -> None:
    wait_whole(target)
    answer, counted = target.ask(), target.metric(OK)
    doomed, other = api_pids(target.pid)
    lost, kept = [stream_on(target, doomed) for _ in range(2)], stream_on(target, other)
    wait(lambda: target.metric(RUNNING) == 3, what="all three run")
    os.kill(doomed, signal.SIGKILL)
    for stream in lost:
        stream.join(GENEROUS)
        assert stream.cut
    wait(lambda: target.metric(RUNNING) == 1, what="the engine has ended what nobody waits for")
    kept.goes_on()
    assert target.ask() == answer  # also of the limits: three of four places were taken
    wait(lambda: target.metric(OK) >= counted + 1, what="the answer is counted")
    wait_whole(target)
    assert doomed not in api_pids(target.pid) and other in api_pids(target.pid)
    wait(lambda: target.metric("reprise_api_process_restarts_total") == 1, what="it is counted")
    for pid in api_pids(target.pid):
        with only(pid, target.pid):
            assert target.ask() == answer
    kept.goes_on()
    os.kill(other, signal.SIGKILL)
    kept.join(GENEROUS)
    wait_whole(target)
    wait(lambda: target.metric(RUNNING) == 0, what="nothing runs")
    assert target.ask() == answer


def test_a_hung_api_process_is_replaced(tmp_path: Path) -> None:
    models = small_and_endless(tmp_path)
    with served(*models, *TWO, "--hang-timeout", str(HUNG_AFTER)) as server:
        target = Patient(server, tmp_path)
        hung, other = api_pids(target.pid)
        lost, kept = stream_on(target, hung), stream_on(target, other)
        stand_still(hung)
        lost.join(HUNG_AFTER + 2 * GENEROUS)
        assert lost.cut
        kept.goes_on()
        wait(lambda: target.metric("reprise_api_process_restarts_total") == 1, what="it is counted")
        wait(lambda: len(api_pids(target.pid)) == 2, what="another one takes its place")
        assert hung not in api_pids(target.pid) and other in api_pids(target.pid)
        assert "no sign of life" in "".join(server.log)
        os.kill(other, signal.SIGKILL)
        kept.join(GENEROUS)


def test_both_drain_and_nothing_is_left(tmp_path: Path) -> None:
    """The engine stands still until both drain: nothing that was asked before ends before."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    flags = (*TWO, "--drain-timeout", "120", "--voices-dir", str(tmp_path / "voices"))
    with served(*SMALL, *flags, TMPDIR=str(temporary)) as server:
        target = Patient(server, tmp_path)
        family = children(target.pid)
        stand_still(engine_pid(target.pid))
        asked: list[Listener] = []
        for number, pid in enumerate(api_pids(target.pid), 1):
            with only(pid, target.pid):
                asked += [
                    Listener(target, "/v1/chat/completions", chat(tokens=80, stream=True)),
                    Listener(target, "/v1/audio/speech", speech()),
                ]
                for line in IN_PROGRESS:
                    wait(lambda line=line, least=number: target.metric(line) >= least, what=f"{line} counts it")
        server.process.send_signal(signal.SIGTERM)
        wait(lambda: "".join(server.log).count("draining 2 requests") == 2, what="both tell of the drain")
        os.kill(engine_pid(target.pid), signal.SIGCONT)
        assert server.process.wait(3 * GENEROUS) == 0
        for listener in asked:
            listener.join(GENEROUS)
            assert listener.status == 200 and not listener.cut
        assert not any(Path(f"/proc/{child}").exists() for child in family)
        assert not list(temporary.iterdir())


def test_what_does_not_end_is_told_and_the_second_signal_ends_at_once(tmp_path: Path) -> None:
    models = small_and_endless(tmp_path)
    for flags, signals in ((("--drain-timeout", "2"), 1), (("--drain-timeout", "3600"), 2)):
        temporary = tmp_path / f"tmp-{signals}"
        temporary.mkdir()
        with served(*models, *TWO, *flags, TMPDIR=str(temporary)) as server:
            target = Patient(server, tmp_path)
            family = children(target.pid)
            streams = [stream_on(target, pid) for pid in api_pids(target.pid)]
            server.process.send_signal(signal.SIGTERM)
            wait(lambda log=server.log: "".join(log).count("draining") == 2, what="both tell of the drain")
            if signals == 2:
                server.process.send_signal(signal.SIGTERM)
            assert server.process.wait(2 * GENEROUS) == 0
            for stream in streams:
                stream.join(GENEROUS)
                assert stream.cut if signals == 2 else stream.told == "engine_unavailable"
            assert not any(Path(f"/proc/{child}").exists() for child in family)
            assert not list(temporary.iterdir())


def test_a_supervisor_killed_outright_leaves_no_process(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    with served(*SMALL, *TWO, TMPDIR=str(temporary), HOME=str(tmp_path)) as server:
        target = Patient(server, tmp_path)
        family = children(target.pid)
        assert len(family) >= 3
        server.process.kill()
        server.process.wait(GENEROUS)
        wait(lambda: not any(Path(f"/proc/{child}").exists() for child in family), what="no child outlives it")
        assert not list(temporary.iterdir())
