"""Time in a trace goes to the kernel that ended it."""

from __future__ import annotations

from typing import Any

from benchmarks.measure.kernel_times import by_kernel, grouped


def event(name: str, ts: float, dur: float, grid: list[int] | None = None, cat: str = "kernel") -> dict[str, Any]:
    return {"name": name, "ts": ts, "dur": dur, "cat": cat, "args": {"grid": grid} if grid else {}}


def test_what_runs_side_by_side_is_counted_once() -> None:
    """`second` starts while `first` runs and waits for it; the two replays lie far apart."""
    one = [event("first", 0.0, 10.0, [8, 1, 1]), event("second", 4.0, 8.0, [1, 1, 1])]
    other = [event(e["name"], e["ts"] + 5000.0, e["dur"], e["args"]["grid"]) for e in one]
    noise = [event("cudaGraphLaunch", 0.0, 3.0, cat="cuda_runtime"), {"name": "process_name", "ph": "M"}]
    rows = by_kernel([*one, *noise, *other], replays=2)
    assert [(row["kernel"], row["calls"], row["each_us"], row["all_us"]) for row in rows] == [
        ("first", 1.0, 10.0, 10.0),
        ("second", 1.0, 2.0, 2.0),
    ]
    assert sum(row["all_us"] for row in rows) == 12.0


def test_kernels_are_summed_by_group() -> None:
    names = {
        "nvjet_sm90_tst_128x96_64x7_4x1_v_bz_TNT": "[4, 30, 1]",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm>": "[8, 1, 1]",
        "void pytorch_flash::flash_fwd_kernel<cutlass::bfloat16_t>": "[8, 1, 1]",
        "_combine_kernel": "[8, 12, 1]",
        "_sum_experts_kernel": "[8, 4, 1]",
        "_rms_norm_kernel": "[8, 1, 1]",
        "_philox_normal_kernel": "[1, 1, 1]",
        "_shrink_kernel": "[1, 1, 1]",
    }
    rows = [{"kernel": kernel, "grid": grid, "all_us": 1000.0} for kernel, grid in names.items()]
    expected = {"attention": 2.0, "adapters": 1.0, "GEMMs": 2.0, "norms and rotation": 1.0, "rest": 2.0, "all": 8.0}
    assert grouped(rows) == expected
