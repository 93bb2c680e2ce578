"""The published recogniser through processor and encoder. Tokens, logits and replays: with the chat families."""

from __future__ import annotations

import numpy as np
import torch

from tests.models.families.family import CPU, RECOGNISER
from tests.models.qwen3_asr.golden import INPUTS, samples
from tests.support.chat_golden import encode, largest_difference
from tests.support.encoder_replay import eager
from tests.support.inference import no_gradients as no_gradients

TOLERANCE = 2e-5
EMBEDS_TOLERANCE = 5e-5
"""From the WAV files: the reference's own transform is 4e-5 off in quiet bands."""


def test_embeddings() -> None:
    for name in INPUTS["audio"]:
        embeds = encode(RECOGNISER.model.encoder, [RECOGNISER.processor.item(samples(name))], CPU)
        assert largest_difference(embeds, RECOGNISER.expected[f"audio.{name}.embeds"]) <= EMBEDS_TOLERANCE, name


def test_parts_of_long_audio_are_those_of_the_whole() -> None:
    """The loudest sound comes last: parts without it have its floor, too."""
    encoder = RECOGNISER.model.encoder
    values = np.random.default_rng(0).normal(0, 0.001, 16_000 * 7 + 5000).astype(np.float32)
    values[-3000:] *= 900
    whole = RECOGNISER.processor.item(values)
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


def test_transcripts_are_read_as_the_makers_do() -> None:
    for case in INPUTS["parse_output"]:
        read = RECOGNISER.processor.transcript(case["raw"])
        assert (read.language or "", read.text) == (case["language"], case["text"])
        assert RECOGNISER.processor.transcript(case["raw"], "English").text == case["forced_text"]
