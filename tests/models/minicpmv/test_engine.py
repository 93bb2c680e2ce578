"""The golden prompts through the engine: all four versions hosted at once, every request in a batch, both routes."""

from __future__ import annotations

import time

import pytest
import torch

from service.engine.start import build_engine
from service.graphs.observations import Observations
from service.link.config import EngineConfig, ModelConfig
from service.link.messages import ChatRequest, SamplingParams
from tests.models.minicpmv.golden import PROMPTS, VERSIONS, directory, expectations, golden_prompt, inputs
from tests.support.devices import DEVICES
from tests.support.inline_engine import ListChannel
from tests.support.routes import replayed_if_captured as replayed_if_captured


@pytest.mark.usefixtures("replayed_if_captured")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("graphs", "max_step_tokens"), [(True, 2048), (False, 2048), (True, 48)])
def test_greedy_tokens_in_a_batch(device: str, graphs: bool, max_step_tokens: int) -> None:
    """Whole prompts, and chunks with cached context, which captured prefills hold."""
    config = EngineConfig(
        models=tuple(ModelConfig(version, str(directory(version)), "float32") for version in VERSIONS),
        device=device,
        kv_cache_tokens=4096,
        max_running=8,
        max_step_tokens=max_step_tokens,
        graphs=graphs,
        # The longest video has 12 slices and goes in two parts.
        encoder_buckets=(210, 420),
        decode_buckets=(1, 8),
    )
    channel = ListChannel()
    with torch.inference_mode():
        engine = build_engine(config, channel, torch.device(device), Observations())
        engine.capture_first()
        for version, name in PROMPTS:
            sampling = SamplingParams(max_tokens=inputs(version)["max_new_tokens"], temperature=0.0)
            prompt = golden_prompt(version, name)
            channel.commands.append(ChatRequest(f"{version} {name}", version, prompt, sampling, time.monotonic()))
        tokens: dict[str, list[int]] = {f"{version} {name}": [] for version, name in PROMPTS}
        running, chunks = set(tokens), set()
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
                    if event.name == "steps_total" and event.labels["kind"] in ("cached_prefill", "prefill", "mixed"):
                        chunks.add((event.labels["kind"], event.labels["route"]))
            channel.outputs.clear()
    for version, name in PROMPTS:
        assert tokens[f"{version} {name}"] == expectations(version, name)["generated_ids"].tolist()
    if max_step_tokens == 48:
        # On a GPU both kinds of captured prefills hold a first chunk; either may be replayed.
        assert ("cached_prefill", "replay") in chunks
        assert chunks <= {("prefill", "replay"), ("cached_prefill", "replay")}
        assert device == "cuda" or ("prefill", "replay") in chunks
