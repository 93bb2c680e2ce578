"""Qwen3-ASR against the published implementation: features, embeddings, prompts, logits, tokens."""

from __future__ import annotations

import pytest
import torch

from tests.models.qwen3_asr import golden
from tests.models.qwen3_asr.golden import AUDIO, INPUTS, PROMPTS, expected, item, model, of, processor, prompt
from tests.support.chat_golden import encode, fill, generate, largest_difference
from tests.support.inference import no_gradients as no_gradients

CPU = torch.device("cpu")
EMBEDS_TOLERANCE, LOGITS_TOLERANCE = 5e-5, 1e-3
"""From the WAV files: the reference's own transform is 4e-5 off in quiet bands."""


def test_features_of_audio() -> None:
    encoder = model().encoder
    for name in AUDIO:
        facts = INPUTS["audio"][name]
        features = encoder.features(item(name))
        mel = features.transpose(0, 1).flatten(1)
        assert not mel[:, facts["frames"] :].any()
        assert item(name).num_embeds == facts["tokens"]
        if f"audio.{name}.mel" in expected():
            assert largest_difference(mel[:, : facts["frames"]], expected()[f"audio.{name}.mel"]) <= 1e-4, name


def test_embeddings() -> None:
    for name in AUDIO:
        embeds = encode(model().encoder, [item(name)], CPU)
        assert largest_difference(embeds, expected()[f"audio.{name}.embeds"]) <= EMBEDS_TOLERANCE, name


def test_windows_and_rows() -> None:
    for name in ("hum", "words"):
        plan = model().encoder.plan([item(name)])
        assert plan.arrays["cu_seqlens"].tolist() == expected()[f"audio.{name}.cu_seqlens"].tolist()


@pytest.mark.parametrize("spare", [0, 13, 65])
def test_all_items_share_a_padded_call(spare: int) -> None:
    encoder = model().encoder
    plan = encoder.plan([item(name) for name in AUDIO])
    bucket = {"patches": plan.required["patches"] + spare, "sequences": plan.required["sequences"] + spare // 13}
    buffers = fill(encoder.buffer_specs(bucket), plan, CPU)
    buffers["mel"][plan.required["patches"] // 13 :] = float("nan")
    wanted = expected()["pack.embeds"]
    assert largest_difference(encoder.forward(buffers, bucket)["embeds"][: len(wanted)], wanted) <= EMBEDS_TOLERANCE


def test_prompts_are_exact() -> None:
    for name in PROMPTS:
        assert prompt(name).token_ids.tolist() == of(name, "input_ids").tolist(), name


@pytest.mark.parametrize("name", PROMPTS)
def test_logits_and_greedy_tokens(name: str) -> None:
    """In chunks that cut the audio: all but the first have cached context."""
    logits, steps, ids = generate(model(), prompt(name), 20, chunk=golden.CHUNK)
    wanted = of(name, "logits")
    assert largest_difference(logits[-len(wanted) :], wanted) <= LOGITS_TOLERANCE
    assert ids == of(name, "generated_ids").tolist()
    assert largest_difference(steps, of(name, "generated_logits")) <= LOGITS_TOLERANCE


def test_transcripts_are_read_as_the_makers_do() -> None:
    for case in INPUTS["parse_output"]:
        read = processor().transcript(case["raw"])
        assert (read.language or "", read.text) == (case["language"], case["text"])
        assert processor().transcript(case["raw"], "English").text == case["forced_text"]
