"""Mutated media and JSON bodies against the real server: refused or answered, never a crash, a hang or a 5xx, and
memory stays bounded."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest

from benchmarks.servers.footprint import footprint
from tests.support.mutants import Mutant, mutants
from tests.support.processes import served
from tests.support.victims import SMALL, Patient
from tests.support.waiting import GENEROUS

COUNTS = {"picture": 300, "video": 80, "clip": 80, "chat": 240, "tools": 120, "speech": 90, "text": 120}
CLIENTS = 3
LIMITS = (
    *("--max-output-tokens", "8", "--max-n", "2", "--max-speech-chars", "200", "--max-frames", "8"),
    *("--max-body", "4M", "--max-request-pixels", "8000000"),
)
GROWTH = {"api": 300 << 20, "engine": 300 << 20, "decoder": 700 << 20, "grammars": 1 << 30}
"""Bytes that each process may grow by at any moment: caches, a full-size picture per thread, a codec's buffers."""
LEAK = re.compile(rb"Traceback|site-packages|/work|/home|\.py\b|0x[0-9a-f]{6,}|<[a-z_.]+ object")


pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Patient]:
    temporary = tmp_path_factory.mktemp("tmp")
    with served(*SMALL, *LIMITS, "--voices-dir", str(temporary / "voices"), TMPDIR=str(temporary)) as server:
        yield Patient(server, temporary).examine()


class Campaign:
    """Sends mutants from a few clients and keeps what went wrong."""

    def __init__(self, patient: Patient, cases: Iterator[Mutant]) -> None:
        self.statuses: Counter[tuple[str, int]] = Counter()
        self.problems: list[str] = []
        self.peaks: Counter[str] = Counter()
        self._patient = patient
        self._cases = cases
        self._lock = threading.Lock()
        self._over = threading.Event()

    def run(self) -> None:
        watcher = threading.Thread(target=self._watch_memory)
        clients = [threading.Thread(target=self._client) for _ in range(CLIENTS)]
        for thread in (watcher, *clients):
            thread.start()
        for client in clients:
            client.join()
        self._over.set()
        watcher.join()

    def _client(self) -> None:
        with httpx.Client(base_url=self._patient.url, timeout=GENEROUS) as http:
            while not self._over.is_set():
                with self._lock:
                    case = next(self._cases, None)
                if case is None:
                    return
                self._try(http, case)

    def _try(self, http: httpx.Client, case: Mutant) -> None:
        name = f"{case.kind} {case.number}"
        try:
            response = http.post(case.path, content=case.body, headers={"content-type": "application/json"})
        except httpx.HTTPError as error:
            self._note(f"{name}: {error!r}")
            return
        self.statuses[case.kind, response.status_code] += 1
        body = response.content
        if response.status_code >= 500:
            self._note(f"{name}: {response.status_code} {body[:200]!r}")
        elif response.status_code >= 400:
            self._check_error(name, body)
        elif b'"error":{' in body and b"data:" in body:
            self._note(f"{name}: failed in mid-stream: {body[-200:]!r}")

    def _check_error(self, name: str, body: bytes) -> None:
        try:
            error = json.loads(body)["error"]
        except (ValueError, KeyError):
            self._note(f"{name}: not an error object: {body[:200]!r}")
            return
        if set(error) != {"message", "type", "param", "code"} or not error["message"]:
            self._note(f"{name}: not OpenAI's error object: {error}")
        if LEAK.search(body) or len(body) > 2000:
            self._note(f"{name}: says too much: {body[:300]!r}")

    def _note(self, problem: str) -> None:
        with self._lock:
            self.problems.append(problem)
            if len(self.problems) > 20:
                self._over.set()

    def _watch_memory(self) -> None:
        while not self._over.wait(0.5):
            now = footprint(self._patient.pid, self._patient.url, self._patient.temporary)
            for role, size in now.resident_bytes.items():
                self.peaks[role] = max(self.peaks[role], size)


def run(patient: Patient, counts: dict[str, int], seed: int) -> Campaign:
    restarts = patient.metric("reprise_engine_restarts_total")
    before = patient.before.resident_bytes
    campaign = Campaign(patient, mutants(counts, seed))
    campaign.run()
    assert not campaign.problems, "\n".join(campaign.problems)
    assert sum(campaign.statuses.values()) == sum(counts.values())
    for role, peak in campaign.peaks.items():
        most = GROWTH[role] * max(1, patient.before.processes.get(role, 1))
        assert peak - before.get(role, 0) < most, f"{role} grew from {before.get(role, 0)} to {peak} bytes"
    assert patient.metric("reprise_engine_restarts_total") == restarts
    patient.assert_well()
    return campaign


def test_a_thousand_mutants(patient: Patient) -> None:
    campaign = run(patient, COUNTS, seed=20_000)
    for kind in COUNTS:
        assert campaign.statuses[kind, 400], f"no mutant of {kind} was refused: nothing was tested"
    assert all(campaign.statuses[kind, 200] for kind in ("picture", "chat", "tools"))
