"""The golden prompts through the engine: all four versions hosted at once, every request in company, both routes."""

from __future__ import annotations

import time

import pytest
import torch

from service.engine.config import EngineConfig, ModelConfig
from service.engine.engine import build_engine
from service.engine.messages import ChatRequest, SamplingParams
from service.graphs.accounting import Observations
from tests.models.minicpmv.golden import PROMPTS, VERSIONS, directory, expectations, golden_prompt
from tests.support.inline_engine import ListChannel


@pytest.mark.parametrize("graphs", [True, False])
def test_greedy_tokens_in_company(graphs: bool) -> None:
    config = EngineConfig(
        models=tuple(ModelConfig(version, str(directory(version))) for version in VERSIONS),
        device="cpu",
        kv_cache_tokens=4096,
        max_running=8,
        graphs=graphs,
        # The longest video has 12 slices and goes in two parts.
        encoder_buckets=(210, 420),
        decode_buckets=(1, 8),
    )
    channel = ListChannel()
    with torch.inference_mode():
        engine = build_engine(config, channel, torch.device("cpu"), Observations())
        engine.capture_first()
        for version, name in PROMPTS:
            sampling = SamplingParams(max_tokens=16, temperature=0.0)
            prompt = golden_prompt(version, name)
            channel.commands.append(ChatRequest(f"{version} {name}", version, prompt, sampling, time.monotonic()))
        tokens: dict[str, list[int]] = {f"{version} {name}": [] for version, name in PROMPTS}
        running = set(tokens)
        while running:
            engine.turn()
            for outputs in channel.outputs:
                assert not outputs.failed
                for delta in outputs.chat:
                    tokens[delta.request_id] += delta.token_ids
                    if delta.finish_reason is not None:
                        running.remove(delta.request_id)
                for event in outputs.observations:
                    if event.name == "steps_total" and event.labels["kind"] == "encoder":
                        assert event.labels["route"] == ("replay" if graphs else "eager")
            channel.outputs.clear()
    for version, name in PROMPTS:
        assert tokens[f"{version} {name}"] == expectations(version, name)["generated_ids"].tolist()
