"""What is compiled: ahead of a start, during it, and while serving, where it is counted and named."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families
from torch import Tensor

from service.engine.start import Compilations, ZeroAllocations, precompile, stamp_file
from service.graphs.observations import Observations
from service.link.config import EngineConfig, ModelConfig, Quantization
from tests.engine.speech.rig import WorkerRig
from tests.engine.speech.test_worker import request, segment
from tests.media.samples import data_url, sound, tone
from tests.models.voxcpm2 import golden
from tests.support import processes
from tests.support.inline_engine import InlineEngine
from tests.support.miniature import talker
from tests.support.optional import needed
from tests.support.processes import ROOT, ServerProcess, served
from tests.support.tiny_chat import tiny_item, tiny_prompt
from tests.support.victims import chat, image_part, speech, video_part

WITH_MEDIA = importlib.util.find_spec("av") is not None
"""Videos, and clips to clone. Some GPU machines lack FFmpeg's libraries and test everything else."""


def counts(observations: Observations) -> dict[tuple[str, str], float]:
    return {(event.labels["phase"], event.labels["cached"]): event.value for event in observations.drain()}


def compiled(compilations: Compilations, *, cache_hit: bool) -> None:
    source, times = SimpleNamespace(name="_some_kernel"), SimpleNamespace(total=2_500_000)
    compilations.compiled(src=source, metadata={}, metadata_group={}, times=times, cache_hit=cache_hit)


def test_what_is_compiled_while_serving_is_counted_and_named(caplog: pytest.LogCaptureFixture) -> None:
    observations = Observations()
    compilations = Compilations(observations)
    with caplog.at_level(logging.WARNING):
        compiled(compilations, cache_hit=False)
        compiled(compilations, cache_hit=True)
        assert counts(observations) == {("start", "false"): 1, ("start", "true"): 1}
        assert not caplog.messages
        compilations.serve()
        assert counts(observations) == {("serving", "false"): 0, ("serving", "true"): 0}
        compiled(compilations, cache_hit=False)
    assert counts(observations) == {("serving", "false"): 1}
    (message,) = caplog.messages
    assert "_some_kernel" in message and "2.50 s" in message


def snapshot(tables: Iterable[Mapping[str, Tensor]]) -> list[Tensor]:
    """All but the scratch slot or page."""
    return [values[1:].clone() for table in tables for values in table.values()]


def test_a_warm_chat_model_is_as_it_was() -> None:
    with torch.inference_mode():
        engine = InlineEngine(graphs=False)
        engine.submit("first", tiny_prompt([[1, 2, 3], tiny_item(1, [8, 6]), [4]]), temperature=1.0, seed=5)
        engine.run()
        runner, tables = engine.worker._runner, vars(engine.worker._runner._state)
        pages = [{name: cache.unflatten(0, (-1, 4)) for name, cache in layer.items()} for layer in runner.graphs.caches]
        state = {name: table for name, table in tables.items() if isinstance(table, Tensor)}
        before = snapshot([state, *pages])
        assert sum(1 for _ in engine.worker.warm_up()) > 20
        torch.testing.assert_close(snapshot([state, *pages]), before, rtol=0, atol=0, equal_nan=True)
        engine.submit("again", tiny_prompt([[1, 2, 3], tiny_item(1, [8, 6]), [4]]), temperature=1.0, seed=5)
        engine.run()
    assert engine.tokens("again") == engine.tokens("first")
    engine.assert_nothing_left()


def test_a_warm_speech_model_is_as_it_was() -> None:
    rig = WorkerRig(golden.model(), max_running=2, buckets=(2,), step_tokens=16, graphs=False)
    first = rig.alone(request("first", segment("Two red boats.")))
    runner = rig.worker._runner
    pages = [{name: cache.unflatten(0, (-1, 16)) for name, cache in layer.items()} for layer in runner.caches]
    before = snapshot([runner.state, *pages])
    assert sum(1 for _ in rig.worker.warm_up()) > 10
    torch.testing.assert_close(snapshot([runner.state, *pages]), before, rtol=0, atol=0)
    np.testing.assert_array_equal(rig.alone(request("again", segment("Two red boats."))).audio, first.audio)
    rig.assert_clean()


MODELS = ("--model", str(ROOT / "tests/golden/qwen2_vl"), "--model", str(talker()))
START_SECONDS = 480
"""With nothing in Triton's cache."""


def compilations_of(url: str) -> dict[str, float]:
    """By phase."""
    totals = {"start": 0.0, "serving": 0.0}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
        for sample in family.samples:
            if sample.name == "reprise_kernel_compilations_total":
                totals[sample.labels["phase"]] += sample.value
    return totals


def chats(seed: int) -> list[dict[str, Any]]:
    """Questions of many lengths, with pictures of many sizes, answered in many ways."""
    chance = random.Random(seed)
    ways: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 3},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.2},
        {"logprobs": True, "top_logprobs": 5},
    ]
    asked = []
    for words in (1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144, 233, 377):
        text = " ".join(chance.choices(("red", "boat", "sea", "a", "and"), k=words + seed))
        sides = [28 * chance.randint(1, 12) for _ in range(2)]
        kind = chance.choice((0, 0, 1, 2 if WITH_MEDIA else 1))
        media = [[], [image_part(*sides, seed=seed + words)], [video_part(4)] if WITH_MEDIA else []][kind]
        asked.append(chat(text, *media, tokens=chance.randint(1, 12), **chance.choice(ways)))
    return asked


def spoken(seed: int) -> list[dict[str, Any]]:
    """Texts of many lengths, in voices of many clips, by every number of solver steps."""
    chance = random.Random(seed)
    asked = []
    for words in (1, 2, 4, 8, 16, 32, 64, 96):
        fields: dict[str, Any] = {"inference_timesteps": chance.choice((4, 10)), "max_len": chance.randint(2, 12)}
        if WITH_MEDIA and chance.random() < 0.5:
            clip = sound(tone(220, 16_000, chance.uniform(0.5, 9.0)), 16_000, "WAV")
            fields["ref_audio"] = data_url(clip, "audio/wav")
        asked.append(speech(" ".join(chance.choices(("yes", "no", "perhaps"), k=words + seed)), **fields))
    return asked


def load(server: ServerProcess, seed: int) -> None:
    """Everything alone, then all of it at once. Speech that would be late may be refused."""
    requests = [("/v1/chat/completions", body) for body in chats(seed)]
    requests += [("/v1/audio/speech", body) for body in spoken(seed)]

    def ask(request: tuple[str, dict[str, Any]]) -> httpx.Response:
        return httpx.post(server.url + request[0], json=request[1], timeout=600)

    def unexpected(answers: Iterable[httpx.Response], *expected: int) -> list[str]:
        texts = [answer.text for answer in answers if answer.status_code not in expected]
        return [*texts, *(line for line in server.log if '"level": "error"' in line)] if texts else []

    assert not unexpected(map(ask, requests), 200)
    with ThreadPoolExecutor(16) as pool:
        assert not unexpected(pool.map(ask, requests * 2), 200, 503)


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "settings", [("--max-running", "12"), ("--max-running", "6", "--no-graphs")], ids=["default bucket lists", "eager"]
)
def test_nothing_is_compiled_after_readiness(settings: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "START_SECONDS", START_SECONDS)
    with served(
        *MODELS, "--device", "cuda", "--max-step-tokens", "192", "--kv-cache-tokens", "16384", *settings
    ) as server:
        load(server, seed=1)
        time.sleep(8)  # an idle engine records what was asked for
        load(server, seed=2)
        time.sleep(1)  # a heartbeat
        total = compilations_of(server.url)
        named = [line for line in server.log if "while serving" in line]
    assert total["start"] > 0
    assert total["serving"] == 0, named


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
