"""Kernels are compiled ahead of a start, and nothing of precompilation stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from service.engine.precompile import ZeroAllocations, precompile, stamp_file
from service.link.config import EngineConfig, ModelConfig, Quantization
from tests.support.inline_engine import InlineEngine
from tests.support.optional import needed
from tests.support.processes import ROOT
from tests.support.tiny_chat import tiny_item, tiny_prompt

needed("triton")


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.empty(4096),
        lambda: torch.empty((64, 64), dtype=torch.int32).t(),
        lambda: torch.empty_like(torch.ones(4096)),
        lambda: torch.ones(1).new_empty(4096),
        lambda: torch.empty_strided((64, 64), (1, 64)),
        lambda: torch.ones(1).new_empty_strided((64, 64), (1, 64)),
    ],
    ids=["empty", "view", "empty_like", "new_empty", "empty_strided", "new_empty_strided"],
)
def test_memory_is_zero(make: Callable[[], Tensor]) -> None:
    torch.full((4096,), 7.0)  # what lies in memory that is given back
    with torch.inference_mode(), ZeroAllocations():
        assert not make().any()
        assert torch.ones(3).sum() == 3


def output_of(module: str, cache: Path, seconds: float) -> dict[str, Any]:
    environment = {**os.environ, "TRITON_CACHE_DIR": str(cache)}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-m", module], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_a_launch_compiles_for_the_cache_and_does_not_run(tmp_path: Path) -> None:
    found = output_of("tests.support.compile_only", tmp_path, 600)
    assert (found["names"], found["restored"]) == (["_silu_mul_kernel"], True)
    # A GEMM that asks for more shared memory than there is falls back, though nothing was launched to find that out.
    reason, fell_back = found["refused"]
    assert "shared memory" in reason and fell_back == "linear_kernel"
    assert list(tmp_path.rglob("_silu_mul_kernel.cubin"))


def test_the_stamp_depends_on_all_that_decides_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    here, there = tmp_path / "here", tmp_path / "there"
    for folder, layers in ((here, 2), (there, 3)):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"num_hidden_layers": layers}))

    def config(path: Path, **settings: Any) -> EngineConfig:
        return EngineConfig((model(path),), **settings)

    def model(path: Path, quantization: Quantization = "none") -> ModelConfig:
        return ModelConfig("name", str(path), quantization=quantization)

    mark = stamp_file(model(here), torch.bfloat16, config(here), "one GPU")
    assert mark.parent == tmp_path / "cache"
    assert mark == stamp_file(model(here), torch.bfloat16, config(there), "one GPU")
    restart = config(here, restarted=True, gpu="1", index=1, sharers=2, threads=3, log_format="json")
    assert mark == stamp_file(model(here), torch.bfloat16, restart, "one GPU")
    others = [
        stamp_file(model(there), torch.bfloat16, config(here), "one GPU"),
        stamp_file(model(here), torch.float16, config(here), "one GPU"),
        stamp_file(model(here), torch.bfloat16, config(here, max_running=65), "one GPU"),
        stamp_file(model(here), torch.bfloat16, config(here), "another GPU"),
        stamp_file(model(here, "fp8"), torch.bfloat16, config(here), "one GPU"),
    ]
    monkeypatch.setattr(torch, "__version__", "3.0")
    others.append(stamp_file(model(here), torch.bfloat16, config(here), "one GPU"))
    assert len({mark, *others}) == 7


def test_a_precompiled_chat_model_answers_as_before(tmp_path: Path) -> None:
    with torch.inference_mode():
        engine = InlineEngine(graphs=False)
        tokens = []
        for name in ("before", "after"):
            engine.submit(name, tiny_prompt([[1, 2, 3], tiny_item(1, [8, 6]), [4]]), temperature=1.0, seed=5)
            engine.run()
            tokens.append(engine.tokens(name))
            engine.assert_nothing_left()
            precompile(InlineEngine(engine.model, graphs=False).worker, tmp_path / "stamp")
    assert tokens[0] == tokens[1]


@pytest.mark.gpu
@pytest.mark.timeout(900)
def test_a_start_compiles_nothing_that_was_not_precompiled(tmp_path: Path) -> None:
    found = output_of("tests.support.cold_start", tmp_path, 280)
    assert len(found["precompiled"]) > 50
    assert found["later"] == []
