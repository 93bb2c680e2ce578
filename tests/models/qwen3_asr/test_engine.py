"""The published recogniser through processor, encoder, decoder and engine."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from models.interfaces.capturable import BufferSpec
from models.interfaces.media import MediaItem
from tests.models.qwen3_asr import golden
from tests.models.qwen3_asr.golden import AUDIO, INPUTS, PROMPTS, expected, item, model, of, processor, prompt
from tests.support.audit import audit
from tests.support.chat_golden import encode, largest_difference
from tests.support.devices import DEVICES
from tests.support.encoder_replay import CapturedEncoder, eager, padded
from tests.support.inference import no_gradients as no_gradients
from tests.support.inline_engine import InlineEngine
from tests.support.slow import slow

TOLERANCE, LOGPROBS_TOLERANCE = 2e-5, 1e-3
BUCKETS = tuple({"patches": 13 * chunks, "sequences": windows} for chunks, windows in ((2, 1), (6, 4), (18, 12)))


def engine_of(device: str = "cpu", **settings: Any) -> InlineEngine:
    settings = {"num_pages": 512, "max_step_tokens": 512, **settings}
    return InlineEngine(model(device), processor(), device=device, **settings)


def check(engine: InlineEngine, name: str, request: str) -> None:
    """Tokens of the reference, with its log probabilities."""
    tokens = of(name, "generated_ids").tolist()
    assert engine.tokens(request) == tokens
    logits = of(name, "generated_logits")[:, : processor().vocab_size].double().log_softmax(-1)
    wanted = logits.gather(1, torch.tensor(tokens)[:, None]).squeeze(1).numpy()
    assert np.abs(engine.log_probabilities(request) - wanted).max() <= LOGPROBS_TOLERANCE


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("chunks", "graphs"), [(True, True), slow(False, True), slow(True, False)])
def test_golden_tokens_in_a_batch(chunks: bool, graphs: bool, device: str) -> None:
    engine = engine_of(device, graphs=graphs, max_step_tokens=golden.CHUNK if chunks else 512)
    for turn in range(2):
        for name in PROMPTS:
            engine.submit(f"{name} {turn}", prompt(name), max_tokens=20, logprobs=0)
        engine.run()
    assert not engine.failures()
    for name in PROMPTS:
        check(engine, name, f"{name} 0")
        check(engine, name, f"{name} 1")  # from the prefix cache
    assert {route for kind, route in engine.routes() if kind == "encoder"} == {"replay" if graphs else "eager"}
    assert (("decode", "replay") in engine.routes()) == graphs
    engine.assert_nothing_left()


def random_item(seed: int, length: int) -> MediaItem:
    made: MediaItem = processor().item(np.random.default_rng(seed).normal(0, 0.1, length).astype(np.float32))
    return made


@cache
def captured() -> CapturedEncoder:
    return CapturedEncoder(model().encoder, BUCKETS)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.differing_executors])
@given(lengths=st.lists(st.integers(1, 70_000), min_size=1, max_size=5))
def test_random_mixes_replay_as_they_run_alone(lengths: list[int]) -> None:
    captured().check_mix([random_item(seed, length) for seed, length in enumerate(lengths)], TOLERANCE)


def test_items_that_fill_a_bucket() -> None:
    for lengths in ((32_000,), (96_000,), tuple([16_000] * 12), (288_000,)):
        captured().check_replay([random_item(seed, length) for seed, length in enumerate(lengths)], TOLERANCE)


def test_padded_rows_of_nan_change_no_bit() -> None:
    encoder, items = model().encoder, [random_item(0, 20_000), random_item(1, 33_000)]
    rows = sum(one.num_embeds for one in items)
    zeros, nans = (padded(encoder, items, BUCKETS[1], mel=value) for value in (0.0, float("nan")))
    assert torch.equal(zeros[:rows], nans[:rows])
    torch.testing.assert_close(nans[:rows], eager(encoder, items), atol=TOLERANCE, rtol=0)


def test_parts_of_long_audio_are_those_of_the_whole() -> None:
    """The loudest sound comes last: parts without it have its floor, too."""
    encoder = model().encoder
    samples = np.random.default_rng(0).normal(0, 0.001, 16_000 * 7 + 5000).astype(np.float32)
    samples[-3000:] *= 900
    whole = processor().item(samples)
    for limit in (
        {"patches": 13 * 5, "sequences": 9},
        {"patches": 9999, "sequences": 2},
        {"patches": 13, "sequences": 9},
    ):
        parts = encoder.split(whole, limit)
        assert len(parts) > 1 and len({part.digest for part in (whole, *parts)}) == len(parts) + 1
        assert all(encoder.split(part, limit) == [part] for part in parts) or limit["patches"] == 13
        together = torch.cat([eager(encoder, [part]) for part in parts])
        torch.testing.assert_close(together, eager(encoder, [whole]), atol=TOLERANCE, rtol=0)
    assert encoder.split(whole, encoder.required([whole])) == [whole]


def test_the_forward_reads_no_value_on_the_host() -> None:
    encoder, width = model().encoder, model().decoder.hidden_size
    assert audit(encoder, BUCKETS[1]) == {"embeds": BufferSpec((BUCKETS[1]["patches"], width), torch.float32)}


CPU = torch.device("cpu")
EMBEDS_TOLERANCE = 5e-5
"""From the WAV files: the reference's own transform is 4e-5 off in quiet bands."""


def test_embeddings() -> None:
    for name in AUDIO:
        embeds = encode(model().encoder, [item(name)], CPU)
        assert largest_difference(embeds, expected()[f"audio.{name}.embeds"]) <= EMBEDS_TOLERANCE, name


def test_transcripts_are_read_as_the_makers_do() -> None:
    for case in INPUTS["parse_output"]:
        read = processor().transcript(case["raw"])
        assert (read.language or "", read.text) == (case["language"], case["text"])
        assert processor().transcript(case["raw"], "English").text == case["forced_text"]
