"""A first token's way, by stage."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from benchmarks import host_path
from benchmarks.loads.raw_client import Answer
from benchmarks.servers.marked import MARK, POINTS, read_marks
from tests.support.golden import GOLDEN


def test_stages_end_at_their_points_and_all_but_the_gpu_is_the_host() -> None:
    # A mark of the request before, one for each point a millisecond apart, and what the second token marks again.
    times = [("written", 0.5), *((point, 1.0 + 0.001 * (n + 1)) for n, point in enumerate(POINTS)), ("heard", 1.05)]
    data = b"".join(MARK.pack(POINTS.index(point), at) for point, at in reversed(times))
    first = 0.001 * (len(POINTS) + 3)
    answer = Answer(200, began=1.0, ended=1.1, first=first, size=0, events=1, reads=1)
    found = host_path.stages(answer, read_marks(data))
    assert found.pop("host_ms") == pytest.approx(1e3 * first - 1)
    assert found.pop("gpu_ms") == pytest.approx(1)
    assert found.pop("read_ms") == pytest.approx(3)
    assert list(found) == [f"{point}_ms" for point in POINTS if point != "computed"]
    assert list(found.values()) == pytest.approx([1] * len(found))


def test_the_server_of_an_older_checkout_is_found(tmp_path: Path) -> None:
    assert host_path.marked_server(None) == host_path.marked_server(Path(__file__).parents[2])
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks/marked_server.py").touch()
    assert host_path.marked_server(tmp_path) == "benchmarks.marked_server"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_way_of_a_first_token_over_a_simulated_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(host_path, "ALONE", 2)
    monkeypatch.setattr(host_path, "TOGETHER", 8)
    monkeypatch.setattr(host_path, "LANES", (4,))
    old = Path(__file__).parents[2]
    rows = json.loads(host_path.main(["--rounds", "2", "--old", str(old)]).read_text())["rows"]
    alone = [row for row in rows if row["run"] == "alone"]
    assert [(row["code"], row["input"]) for row in alone] == [
        (code, what.name) for what in host_path.INPUTS for code in ("before", "now")
    ]
    for row in alone:
        assert 0 < row["prepared_ms"] < row["host_ms"]
        assert row["gpu_ms"] > 0  # what is left of it depends on when the host came to launch the last pass
    together = [row for row in rows if row["run"] == "together"]
    assert len(together) == len(alone) and all(row["api_cpu_ms"] > 0 < row["engine_cpu_ms"] for row in together)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_way_of_a_first_piece_of_audio_through_a_miniature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def miniature(model: str, parent: Path) -> Path:
        shutil.copytree(GOLDEN / model, parent / model, ignore=shutil.ignore_patterns("*.safetensors"))
        return parent / model

    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(host_path, "make", miniature)
    monkeypatch.setattr(host_path, "ALONE", 2)
    # Processor time is counted in hundredths of a second, in which an API process answers several of these.
    monkeypatch.setattr(host_path, "TOGETHER", 60)
    monkeypatch.setattr(host_path, "LANES", (2,))
    alone, together = json.loads(host_path.main(["--gpu", "voxcpm2", "--rounds", "1"]).read_text())["rows"]
    assert (alone["run"], together["run"]) == ("alone", "together")
    assert 0 < alone["prepared_ms"] < alone["host_ms"] and alone["written_ms"] > 0
    assert together["api_cpu_ms"] > 0 < together["engine_cpu_ms"]
