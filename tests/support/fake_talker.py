"""A speech model without weights, beside the chat model of fake_chat. Its engine is that of fake_engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from models.interfaces.errors import InputError
from models.interfaces.processor import SpeechLayout
from service.hub import Checkpoint
from service.hub.catalog import Catalog, HostedModel
from tests.support.fake_chat import fake_catalog
from tests.support.fake_engine import PATCH, RATE


class FakeSpeechProcessor:
    solver_steps = (10, 4)
    cfg_value = 2.0
    min_patches = 2
    context_length = 4096
    sample_rate = RATE
    samples_per_patch = PATCH
    reference_sample_rate = 16_000

    def tokenize(self, text: str) -> list[int]:
        if not text.strip():
            raise InputError("input", "the text holds nothing to speak")
        if "ж" in text:
            raise InputError("input", "the text holds no character that this model can speak")
        return list(text.encode())

    def unspoken(self, text: str) -> str:
        return "".join(dict.fromkeys(character for character in text if character in "世界"))

    def layout(self, text_ids: Sequence[int], *, reference_patches: int = 0, prompt_patches: int = 0) -> SpeechLayout:
        length = len(text_ids) + reference_patches + prompt_patches
        return SpeechLayout(np.zeros(length, np.int32), np.zeros(length, bool))

    def max_patches(self, text_ids: Sequence[int]) -> int:
        return 6 * len(text_ids) + 10


def talking_catalog(talkers: int = 1) -> Catalog:
    chat = fake_catalog().models
    speech = [
        HostedModel((name,), "speech", Checkpoint(name, Path("/", name)), FakeSpeechProcessor, 1)
        for name in ("talker", *(f"talker-{n}" for n in range(1, talkers)))
    ]
    return Catalog([*chat, *speech])
