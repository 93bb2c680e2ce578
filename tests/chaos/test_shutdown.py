"""SIGTERM under load: readiness first, streams finish, the rest hears of it, nothing is left, status 0."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from benchmarks.servers.footprint import children, engine_pid
from tests.support.processes import ServerProcess, served, stand_still
from tests.support.victims import (
    SMALL,
    TEXT,
    Listener,
    Patient,
    SocketListener,
    chat,
    endless,
    long_speech,
    small_and_endless,
    speech,
)
from tests.support.waiting import GENEROUS, wait

pytestmark = pytest.mark.slow
IN_PROGRESS = "reprise_http_requests_in_progress"


def warm(server: ServerProcess, temporary: Path) -> Patient:
    """A server that has answered: its first requests are admitted later than they are counted."""
    patient = Patient(server, temporary)
    assert patient.ask() and patient.speak()
    return patient


def assert_gone(family: list[int]) -> None:
    wait(lambda: not any(Path(f"/proc/{child}").exists() for child in family), what="no child outlives the server")


def test_what_was_asked_before_a_drain_is_answered(tmp_path: Path) -> None:
    """Also by a signal to all processes, as systemd sends it. The engine stands still until the drain has begun:
    nothing asked before ends before, however fast the machine."""
    drain = ("--drain-delay", "1", "--drain-timeout", "120", "--hang-timeout", "600")
    with served(*SMALL, *drain, TMPDIR=str(tmp_path)) as server:
        patient = warm(server, tmp_path)
        engine = engine_pid(patient.pid)
        stand_still(engine)
        asked = [
            Listener(patient, "/v1/chat/completions", chat(tokens=80, stream=True)),
            Listener(patient, "/v1/chat/completions", chat(tokens=80)),
            Listener(patient, "/v1/audio/speech", speech()),
        ]
        talk = SocketListener(patient, TEXT, max_len=12)
        wait(lambda: patient.metric(IN_PROGRESS) >= 5, what="four requests and the look at them are in progress")
        for process in (*children(patient.pid), patient.pid):
            os.kill(process, signal.SIGTERM)
        wait(lambda: "draining 4 requests" in "".join(server.log), what="the log tells of the drain")
        os.kill(engine, signal.SIGCONT)
        assert server.process.wait(3 * GENEROUS) == 0
        for thread in (*asked, talk):
            thread.join(GENEROUS)
            assert not thread.is_alive()
        assert [listener.status for listener in asked] == [200] * 3 and not any(listener.cut for listener in asked)
        assert b"[DONE]" in asked[0].data and asked[2].data
        assert talk.types()[-1] == "session.done" and talk.num_bytes and talk.code == 1001


def test_a_drain_of_what_does_not_end(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    flags = ("--drain-delay", "20", "--drain-timeout", "5", "--voices-dir", str(tmp_path / "voices"))
    with served(*small_and_endless(tmp_path), *flags, TMPDIR=str(temporary)) as server:
        patient = Patient(server, temporary).examine()
        family = children(patient.pid)
        endless_ones = [
            Listener(patient, "/v1/chat/completions", endless()),
            Listener(patient, "/v1/audio/speech", long_speech(stream_format="sse")),
        ]
        plain = Listener(patient, "/v1/audio/speech", long_speech())
        endless_talk = SocketListener(patient, long_speech()["input"], min_len=200, max_len=200)
        for listener in (*endless_ones, plain, endless_talk):
            assert listener.begun.wait(2 * GENEROUS)
        server.process.send_signal(signal.SIGTERM)
        patient.wait_status("/ready", 503)
        assert patient.status("/health") == 200
        refused = patient.post("/v1/chat/completions", chat())
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert server.process.wait(2 * GENEROUS) == 0
        for thread in (*endless_ones, plain, endless_talk):
            thread.join(GENEROUS)
            assert not thread.is_alive()
        assert [listener.told for listener in endless_ones] == ["engine_unavailable"] * 2
        assert plain.cut
        assert endless_talk.types()[-1] == "error"
        assert not any(Path(f"/proc/{child}").exists() for child in family)
        assert not list(temporary.glob("reprise-*"))


def test_the_second_signal_ends_at_once(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    models = small_and_endless(tmp_path)
    with served(*models, "--drain-delay", "0", "--drain-timeout", "3600", TMPDIR=str(temporary)) as server:
        patient = warm(server, temporary)
        family = children(patient.pid)
        stream = Listener(patient, "/v1/chat/completions", endless())
        assert stream.begun.wait(GENEROUS)
        server.process.send_signal(signal.SIGTERM)
        wait(lambda: "draining" in "".join(server.log), what="the first signal is told in the log")
        assert server.process.poll() is None and stream.is_alive()
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(GENEROUS)
        stream.join(GENEROUS)
        assert not stream.is_alive()
        assert_gone(family)
        assert not list(temporary.glob("reprise-*"))
        server.stop()  # until its log has been read
        assert not [line for line in server.log if "Traceback" in line]


def test_a_server_killed_outright_leaves_no_process(tmp_path: Path) -> None:
    """kill -9 of the API process: engine and decoders notice and end, and nothing is left in the file system."""
    with served(*SMALL, TMPDIR=str(tmp_path)) as server:
        patient = Patient(server, tmp_path).examine()
        family = children(patient.pid)
        assert len(family) >= 2
        server.process.kill()
        server.process.wait(GENEROUS)
        assert_gone(family)
        assert not list(tmp_path.glob("reprise-*"))
