"""`reprise tune` without a GPU: which GEMMs, which candidates, what is kept, and how it is stored and read."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.checkpoints.published import make
from benchmarks.kernels.offline import ARCHITECTURES
from models.layers.kernels import gemm_configs, gemm_store, gemm_types, gpu
from models.layers.kernels.gemm_types import Choice, Shape, Tile, Variant
from service.cli.main import app
from service.tuning.run import Task, tasks_of
from tests.support.optional import needed
from tests.support.processes import ROOT
from tests.support.slow import slow

needed("triton")

from service.tuning.run import GAIN, Operands, WrongResult, tune, variants_of  # noqa: E402 (needs triton)  # noqa: E402

ADA = next(one for one in ARCHITECTURES if one.capability == (8, 9))
HOPPER = next(one for one in ARCHITECTURES if one.capability == (9, 0))
PLAIN = Shape("plain", 1024, 512)
TABLE = {PLAIN: (Choice(2, 8, Variant(Tile(16, 64, 128, stages=3, swap=True))),), Shape("silu_mul", 256, 512): ()}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("qwen2_vl_2b", {("plain", 1536, 2048), ("add_norm", 8960, 1536), ("quick_gelu", 1280, 5120)}),
        ("voxcpm2", {("plain", 2048, 2560), ("silu_mul", 2048, 6144), ("add_norm", 4096, 1024)}),
        slow("qwen3_vl_30b_a3b", {("plain", 2048, 5120), ("add_norm", 4096, 2048)}),
        slow("kimi_vl_a3b", {("plain", 2048, 576), ("silu_mul", 2048, 2816), ("plain", 2816, 2048)}),
    ],
)
def test_tasks_are_the_gemms_of_a_checkpoint(name: str, shapes: set[tuple[str, int, int]], tmp_path: Path) -> None:
    tasks = tasks_of(make(name, tmp_path))
    assert len(tasks) == len(set(tasks))
    assert shapes <= {(task.shape.kind, task.shape.inputs, task.shape.outputs) for task in tasks}
    most = {(task.shape.inputs, task.shape.outputs): 0 for task in tasks}
    for task in tasks:
        most[task.shape.inputs, task.shape.outputs] = max(most[task.shape.inputs, task.shape.outputs], task.max_rows)
    if name == "voxcpm2":  # its local stacks have many rows a stream
        assert (most[2048, 2560], most[1024, 2560]) == (512, 2048)


def test_what_is_faster_than_the_rules_is_kept() -> None:
    tasks = [Task(PLAIN, 2, 8), Task(PLAIN, 9, 16), Task(PLAIN, 17, 32)]
    favourites = {task: variants_of(task, ADA)[index] for index, task in enumerate(tasks)}
    lines: list[str] = []

    def time_of(task: Task, variant: Variant | None) -> float | None:
        if variant is None:
            return 10.0
        if task.max_rows == 32:
            return 10.0 * GAIN + 0.01  # no gain
        if variant != favourites[task]:
            return None if task.max_rows == 16 else 11.0  # wrong results, or slower
        return 7.0

    assert tune(tasks, ADA, time_of, lines.append) == {
        PLAIN: (Choice(2, 8, favourites[tasks[0]]), Choice(9, 16, favourites[tasks[1]]))
    }
    assert len(lines) == 3
    assert "7.0 us" in lines[0] and "by rule" in lines[2]


@pytest.mark.parametrize("kind", ["plain", "silu_mul", "add_norm", "quick_gelu"])
def test_results_are_checked(kind: gemm_types.Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, with float16 for the bfloat16 that it lacks."""
    if torch.cuda.is_available():
        pytest.skip("operands lie on the CPU, for the interpreter")
    monkeypatch.setattr(torch, "bfloat16", torch.float16)
    operands = Operands(Shape(kind, 64, 64), 5, torch.device("cpu"))
    variant = Variant(Tile(16, 32, 32, stages=2), split=2 if kind == "add_norm" else 1)
    operands.check(variant)
    operands.weights[0] = operands.weights[0] * 1.1
    with pytest.raises(WrongResult, match="relative error"):
        operands.check(variant)


def test_a_table_is_stored_for_its_gpu(cache: Path) -> None:
    assert gemm_store.load(ADA) is None
    path = gemm_store.save(TABLE, ADA)
    assert path.is_relative_to(cache)
    assert "sm_89" in path.name and "triton" in path.name
    assert gemm_store.load(ADA) == TABLE
    assert gemm_store.load(HOPPER) is None
    other = {Shape("plain", 64, 64): (Choice(2, 8, Variant(Tile(16, 64, 64))),)}
    gemm_store.save(other, ADA)
    assert gemm_store.load(ADA) == {**TABLE, **other}


BROKEN = {
    "no JSON": lambda text: text[:-20],
    "too large": lambda text: text.replace('"stages": 3', '"stages": 99'),
    "no divisor": lambda text: text.replace('"columns": 64', '"columns": 96'),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_table_that_cannot_be_used_is_named_and_left_out(
    fault: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = gemm_store.save(TABLE, ADA)
    path.write_text(BROKEN[fault](path.read_text()))
    with pytest.raises(gemm_store.TableError, match="reprise tune"):
        gemm_store.load(ADA)
    monkeypatch.setattr(gemm_configs, "_tuned", None)
    with caplog.at_level(logging.INFO):
        gemm_store.use_stored(ADA)
    assert gemm_configs._tuned is None
    assert str(path) in caplog.text and "by rule" in caplog.text


def test_a_start_takes_the_stored_table(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_configs, "_tuned", None)
    gemm_store.save(TABLE, ADA)
    with caplog.at_level(logging.INFO):
        gemm_store.use_stored(ADA)
    assert gemm_configs.active() == TABLE
    assert "reprise tune" in caplog.text and "sm_89" in caplog.text


def command(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["tune", *arguments])
    return done.exit_code, done.output


def test_a_dry_run_lists_what_would_be_measured(tmp_path: Path) -> None:
    status, output = command("--model", str(make("qwen2_vl_2b", tmp_path)), "--dry-run")
    assert status == 0
    assert "5 shapes, 33 measurements" in output
    assert "add_norm 8960 -> 1536, 2 to 8 rows" in output


def test_a_checkpoint_that_cannot_be_hosted_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "unknown"}))
    status, output = command("--model", str(tmp_path), "--dry-run")
    assert status == 2
    assert "is not hosted" in output


def test_an_old_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "probe", lambda: gpu.Gpu("GTX 1080", (6, 1), 48 << 10, 20))
    status, output = command("--model", str(ROOT / "models/embedded/qwen2_vl"))
    assert status == 2
    assert "sm_61" in output and "sm_80" in output
