"""SIGTERM under load: readiness first, streams finish, the rest hears of it, nothing is left, status 0."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from benchmarks.footprint import children
from tests.support.processes import served
from tests.support.victims import (
    SMALL,
    TEXT,
    Listener,
    Patient,
    SocketListener,
    chat,
    endless,
    long_speech,
    speech,
)

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]


def test_a_drain_under_load(tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    flags = ("--drain-delay", "0.5", "--drain-timeout", "12", "--voices-dir", str(tmp_path / "voices"))
    with served(*SMALL, *flags, TMPDIR=str(temporary)) as server:
        patient = Patient(server, temporary)
        family = children(patient.pid)
        short = [
            Listener(patient, "/v1/chat/completions", chat(tokens=80, stream=True)),
            Listener(patient, "/v1/chat/completions", chat(tokens=80)),
            Listener(patient, "/v1/audio/speech", speech()),
        ]
        talk = SocketListener(patient, TEXT, max_len=12)
        endless_ones = [
            Listener(patient, "/v1/chat/completions", endless()),
            Listener(patient, "/v1/audio/speech", long_speech(stream_format="sse")),
        ]
        plain = Listener(patient, "/v1/audio/speech", long_speech())
        endless_talk = SocketListener(patient, long_speech()["input"], min_len=200, max_len=200)
        for listener in (*endless_ones, plain, endless_talk):
            assert listener.begun.wait(30)
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        assert patient.status("/ready") == 503 and patient.status("/health") == 200
        refused = patient.post("/v1/chat/completions", chat())
        assert refused.status_code == 503 and refused.headers["retry-after"]
        assert server.process.wait(40) == 0
        assert time.monotonic() - began < 12 + 0.5 + 4
        for thread in (*short, talk, *endless_ones, plain, endless_talk):
            thread.join(5)
            assert not thread.is_alive()
        assert [listener.status for listener in short] == [200] * 3 and not any(listener.cut for listener in short)
        assert b"[DONE]" in short[0].data and short[2].data
        assert talk.types()[-1] == "session.done" and talk.num_bytes and talk.code == 1001
        assert [listener.told for listener in endless_ones] == ["engine_unavailable"] * 2
        assert plain.cut
        assert endless_talk.types()[-1] == "error"
        assert not any(Path(f"/proc/{child}").exists() for child in family)
        assert not list(temporary.glob("reprise-*"))


def test_the_second_signal_ends_at_once(tmp_path: Path) -> None:
    with served(*SMALL, "--drain-timeout", "60", TMPDIR=str(tmp_path)) as server:
        patient = Patient(server, tmp_path)
        family = children(patient.pid)
        stream = Listener(patient, "/v1/chat/completions", endless())
        assert stream.begun.wait(30)
        server.process.send_signal(signal.SIGTERM)
        time.sleep(1)
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(10)
        stream.join(5)
        assert not stream.is_alive()
        deadline = time.monotonic() + 5
        while any(Path(f"/proc/{child}").exists() for child in family):
            assert time.monotonic() < deadline, "a child outlived the server"
            time.sleep(0.05)
        assert not list(tmp_path.glob("reprise-*"))


def test_a_server_killed_outright_leaves_no_process(tmp_path: Path) -> None:
    """kill -9 of the API process: engine and decoders notice and end, and nothing is left in the file system."""
    with served(*SMALL, TMPDIR=str(tmp_path)) as server:
        patient = Patient(server, tmp_path)
        family = children(patient.pid)
        assert len(family) >= 2
        server.process.kill()
        server.process.wait(5)
        deadline = time.monotonic() + 10
        while any(Path(f"/proc/{child}").exists() for child in family):
            assert time.monotonic() < deadline, "a child outlived the server"
            time.sleep(0.05)
        assert not list(tmp_path.glob("reprise-*"))
