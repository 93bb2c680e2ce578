"""The scripts of benchmarks/ run, and the report understands what they write; on miniatures."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from benchmarks import beside, chat_http, engines, peers, serving, small_gpu, speech_http, startup
from benchmarks.commands import COMMANDS
from benchmarks.measure.record import RESULTS
from benchmarks.peers import __main__ as compare
from benchmarks.report.documents import ROOT
from benchmarks.report.results import PEERS, Results
from benchmarks.report.tables import TABLES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(autouse=True)
def written_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))


def accept(written: Path, name: str) -> Results:
    """The tiny result under the name of the full one, its model called like a published one."""
    content = json.loads(written.read_text())
    content["model"] = "voxcpm2" if "speech" in name or "voxcpm2" in name else "qwen2_vl_2b"
    shutil.copy(RESULTS / PEERS, written.parent)
    (written.parent / f"{name}.json").write_text(json.dumps(content))
    return Results(written.parent)


def test_speech_through_http(tmp_path: Path) -> None:
    results = accept(speech_http.main(["closed", "--tiny"]), "speech_http_closed")
    accept(speech_http.main(["listeners", "--tiny", "--rates", "2", "--seconds", "4"]), "speech_http_listeners")
    facts = results["speech_http_closed"].facts
    assert facts["prefix_cache_hit_tokens"] > 0 and facts["steps"]["vae replay captured"] > 0
    assert len(facts["voices"]) > 2
    (row,) = results["speech_http_listeners"].rows
    assert 0 < row["succeeded"] == row["requests"] < 10 and row["listeners"] == pytest.approx(2 * 0.64)
    assert row["first_p25_ms"] <= row["first_p50_ms"] <= row["first_p75_ms"]
    for name in ("speech-http", "speech-listeners"):
        assert "speech_http_" in TABLES[name](results), name


def test_chat_through_http(tmp_path: Path) -> None:
    results = accept(chat_http.main(["latency", "--tiny"]), "chat_http_latency_qwen2_vl_2b")
    facts = results["chat_http_latency_qwen2_vl_2b"].facts
    assert facts["encoder_cache_hits"] == 0 == facts["prefix_cache_hit_tokens"]
    assert facts["encoder_cache_misses"] >= 8
    assert "| 112 x 112 JPEG |" in TABLES["chat-latency"](results)


def test_one_and_two_engines(tmp_path: Path) -> None:
    written = json.loads(engines.main(["conversations", "--rounds", "1", "--tiny"]).read_text())
    rows = written["rows"]
    assert [(row["load"], row["gpus"]) for row in rows] == [("conversations", 1), ("conversations", 2)]
    assert all(row["succeeded"] == row["requests"] for row in rows)
    assert sorted(rows[1]["steps_by_engine"]) == ["0", "1"] and rows[1]["choices"]["affinity"] > 0


def test_chat_beside_speech(tmp_path: Path) -> None:
    results = accept(beside.main(["--tiny"]), "beside_qwen2_vl_2b")
    rows = results["beside_qwen2_vl_2b"].rows
    assert [(row["load"], row["beside"]) for row in rows] == [
        ("chat", False), ("speech", False), ("chat", True), ("speech", True),
    ]  # fmt: skip
    assert all(row["succeeded"] == row["requests"] > 0 for row in rows)
    assert all(row["tokens_per_s" if row["load"] == "chat" else "audio_s_per_s"] > 0 for row in rows)
    table = TABLES["beside"](results)
    assert "| 2.00 chats/s | beside the other |" in table and "| 2 streams of speech | alone |" in table


def test_start_to_ready(tmp_path: Path) -> None:
    results = accept(startup.main(["voxcpm2", "--warm", "1", "--tiny"]), "startup_voxcpm2")
    rows = [line for line in TABLES["startup"](results).splitlines() if line.startswith("| VoxCPM2")]
    assert [row.split(" | ")[2] for row in rows] == ["empty", "full"]


def test_a_quantised_checkpoint_on_a_small_gpu(tmp_path: Path) -> None:
    content = json.loads(small_gpu.main(["--tiny", "--starts", "1"]).read_text())
    (row,) = content["rows"]
    assert row["succeeded"] == row["requests"] == 32 and row["out_of_memory"] == 0
    assert 1 << 30 < content["dry_run"]["used"] < content["gpu_bytes"] == round(7.8 * 2**30)


def test_transformers_beside_us(tmp_path: Path) -> None:
    compare.main(["transformers", "--tiny"])
    rows = json.loads((tmp_path / "peers_transformers_tiny.json").read_text())["rows"]
    assert [row["what"] for row in rows] == ["encoder", "first token", "decode step"]
    assert all(0 < row["p10_ms"] <= row["ms"] <= row["p90_ms"] for row in rows)


def test_every_command_names_a_module_and_every_peer_an_adapter() -> None:
    for command in COMMANDS:
        module = re.fullmatch(r"python -m benchmarks\.(\w+).*", command.command)
        assert module and (ROOT / f"benchmarks/{module[1]}.py").exists(), command.command
        for peer in command.peers.split():
            assert peer in compare.PACKAGES
            assert (Path(peers.__file__).parent / f"{peer}.py").exists()


def test_every_shape_on_a_miniature(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPRISE_API_PROCESSES", "1")  # whatever the machine has
    serving.main(["all", "--tiny"])
    for kind in serving.RUNS:
        result = json.loads((tmp_path / f"serving_{kind}_tiny.json").read_text())
        assert all(row["succeeded"] == row["requests"] > 0 for row in result["rows"]), kind
        assert all(row["eager_prefill_share"] is not None for row in result["rows"]), kind
        assert result["api_processes"] == 1
        if kind != "long":
            parts = [sum(row[f"{part}_share"] for part in ("encoder", "prefill", "decode")) for row in result["rows"]]
            assert all(min(row["prefill_share"], row["decode_share"]) > 0 for row in result["rows"]), kind
            assert parts == pytest.approx([row["gpu_busy_share"] for row in result["rows"]]) and max(parts) < 1.05
        assert all(row["longest_step_at_most_ms"]["decode replay"] > 0 for row in result["rows"]), kind
        if kind in ("closed", "conversations"):
            assert all(row["steps_allow_share"] > 0 for row in result["rows"]), kind
    talks = json.loads((tmp_path / "serving_conversations_tiny.json").read_text())
    assert talks["encoder_cache_hits"] == 0 and all(row["cached_tokens"] > 0 for row in talks["rows"])
