"""Kernels are compiled ahead of a start, and nothing of the rehearsal stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from service.engine.rehearsal import ZeroAllocations, compiling, rehearse
from tests.engine.speech.rig import WorkerRig
from tests.engine.speech.test_worker import request, segment
from tests.models.voxcpm2 import golden
from tests.support.inline_engine import InlineEngine
from tests.support.processes import ROOT
from tests.support.tiny_chat import tiny_item, tiny_prompt

pytest.importorskip("triton")


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


def test_a_launch_compiles_for_the_cache_and_does_not_run(tmp_path: Path) -> None:
    found = output_of("tests.support.compile_only", tmp_path, 120)
    assert found == {"names": ["_silu_mul_kernel"], "restored": True}
    assert list(tmp_path.rglob("_silu_mul_kernel.cubin"))


def test_launches_run_again_after_an_error() -> None:
    from triton.runtime.jit import JITFunction

    run = JITFunction.run
    with pytest.raises(ZeroDivisionError), compiling():
        assert JITFunction.run is not run
        raise ZeroDivisionError
    assert JITFunction.run is run


def test_a_rehearsed_chat_model_answers_as_before() -> None:
    with torch.inference_mode():
        engine = InlineEngine(graphs=False)
        tokens = []
        for name in ("before", "after"):
            engine.submit(name, tiny_prompt([[1, 2, 3], tiny_item(1, [8, 6]), [4]]), temperature=1.0, seed=5)
            engine.run()
            tokens.append(engine.tokens(name))
            engine.assert_nothing_left()
            rehearse(InlineEngine(engine.model, graphs=False).worker)
    assert tokens[0] == tokens[1]


def test_a_rehearsed_speech_model_speaks_as_before() -> None:
    model, processor = golden.model(), golden.processor()
    settings: dict[str, Any] = {"max_running": 2, "buckets": (2,), "step_tokens": 16, "graphs": False}
    before = WorkerRig(model, processor, **settings).alone(request("before", segment("Two red boats.")))
    rehearse(WorkerRig(model, processor, **settings).worker)
    after = WorkerRig(model, processor, **settings).alone(request("after", segment("Two red boats.")))
    np.testing.assert_array_equal(after.audio, before.audio)


@pytest.mark.gpu
@pytest.mark.timeout(300)
def test_a_start_compiles_nothing_that_was_not_rehearsed(tmp_path: Path) -> None:
    found = output_of("tests.support.cold_start", tmp_path, 280)
    assert len(found["rehearsed"]) > 50
    assert found["later"] == []
