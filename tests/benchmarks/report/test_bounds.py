"""What the best kernels allow a step comes from results of kernels and from profiles."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.report.bounds import bound_of
from benchmarks.report.results import Results
from benchmarks.report.tables.targets import UNPROFILED, bounds
from benchmarks.report.targets import StepOf

FACTS = {
    "time": "2026-01-02T03:04:05Z",
    "commit": "0123456789",
    "device": {"name": "an H100"},
    "versions": {"torch": "2.11.0"},
}
PICTURE = StepOf("encoder", "qwen2_vl_2b", "448x448")


@pytest.fixture
def results(tmp_path: Path) -> Results:
    (tmp_path / "kernels").mkdir()
    return Results(tmp_path)


def write(results: Results, name: str, rows: list[dict[str, Any]]) -> None:
    (results.folder / f"{name}.json").write_text(json.dumps({**FACTS, "rows": rows}))


def timed(shape: str, microseconds: float, variant: str = "rules") -> dict[str, Any]:
    return {"shape": shape, "variant": variant, "median_us": microseconds}


def spent(kernel: str, microseconds: float, **size: int) -> dict[str, Any]:
    return {"kernel": kernel, "grid": "[1, 1, 1]", "all_us": microseconds, **size}


def test_a_decode_step_is_bound_by_the_fastest_of_each_gemm(results: Results) -> None:
    parts = [timed(f"qwen2b {part}, 8 rows", 10.0) for part in ("qkv", "out", "gate_up", "down")]
    faster = [timed("qwen2b down, 8 rows", 5.0, "bfloat16"), timed("qwen2b down, 8 rows", 1.0, "gemv")]
    write(results, "kernels/gemms", parts)
    assert bound_of(results, StepOf("decode", "qwen2_vl_2b", "8")).all_ms is None, "the head is a part of it"
    write(results, "kernels/e4m3_qwen2b", faster)
    write(results, "kernels/heads", [timed("qwen2-vl 2b, 8 rows", 160.0)])
    write(results, "kernels/attention_paged_decode", [timed("qwen2b, 8 x 512", 5.0), timed("qwen2b, 8 x 2000", 1.0)])
    bound = bound_of(results, StepOf("decode", "qwen2_vl_2b", "8"))
    assert bound.gemms_ms == pytest.approx((28 * 35 + 160) / 1e3), "weights of 8 bits do not count"
    assert bound.all_ms == pytest.approx((28 * 40 + 160) / 1e3)


def test_an_encoder_is_bound_by_its_profiles_gemms_and_the_better_attention(results: Results) -> None:
    write(results, "kernels/attention", [timed("1 x 1024, 16 x 80", 18.5), timed("1 x 1024, 16 x 80", 30.0, "flash")])
    assert (bound_of(results, PICTURE).gemms_ms, bound_of(results, PICTURE).all_ms) == (None, None)
    rows = [spent("nvjet", 2300.0), spent("_varlen_kernel", 900.0), spent("_layer_norm_kernel", 400.0)]
    write(results, "replay_profile_qwen2_vl_2b_encoder_448", rows)
    bound = bound_of(results, PICTURE)
    assert bound.all_ms == pytest.approx(2.3 + 32 * 18.5e-3)
    assert bound.profile == "replay_profile_qwen2_vl_2b_encoder_448"


def test_an_earlier_profile_has_several_sizes(results: Results) -> None:
    rows = [spent("nvjet", 2300.0, size=448), spent("nvjet", 9000.0, size=1024)]
    write(results, "replay_profile_qwen2_vl_2b_encoder", rows)
    assert bound_of(results, PICTURE).all_ms == pytest.approx(2.3)
    assert bound_of(results, StepOf("encoder", "qwen2_vl_2b", "224x224")).all_ms is None


def test_the_table_has_missed_targets_alone(results: Results) -> None:
    row = {"model": "qwen2_vl_2b", "graph_ms": 3.0, "floor_ms": 1.0}
    met, missed = row | {"input": "224x224", "replay_ms": 2.0}, row | {"input": "448x448", "replay_ms": 3.5}
    write(results, "encoder_qwen2_vl_2b", [met, missed])
    lines = bounds(results).splitlines()
    assert lines[2] == f"| Qwen2-VL-2B encoder, 448 x 448 | 1.7, 1.6 | 1.00 | 3.50 |  |  | {UNPROFILED} |"
    assert not any("224" in line for line in lines)
    write(results, "replay_profile_qwen2_vl_2b_encoder_448", [spent("nvjet", 2300.0), spent("_varlen_kernel", 900.0)])
    line, _, source = bounds(results).splitlines()[2:]
    assert line.endswith("| 3.50 | 2.30 | 0.900 | 3.20 |") and "replay_profile_qwen2_vl_2b_encoder_448" in source
