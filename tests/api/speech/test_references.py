"""Encoded reference audio is kept for the next request with the same audio."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from service.api.speech.speaker import encode
from service.link.messages import EncodeReference, ReferenceEncoded
from service.voices import CACHED_REFERENCES, LruCache


class Encoder:
    """An engine whose patches hold the number of their request."""

    def __init__(self) -> None:
        self.asked: list[EncodeReference] = []

    def submit(self, request: EncodeReference) -> AsyncGenerator[ReferenceEncoded]:
        self.asked.append(request)
        return self._answer(len(self.asked))

    async def _answer(self, number: int) -> AsyncGenerator[ReferenceEncoded]:
        yield ReferenceEncoded(self.asked[-1].request_id, np.full((1, 1, 1), number, np.float32))


@pytest.mark.parametrize("length", [4, 100])
async def test_kept_are_those_of_one_model_and_one_side_of_padding(length: int) -> None:
    """However long the names of models are, and however much of them is the same."""
    engine = Encoder()
    context: Any = SimpleNamespace(engine=engine, references=LruCache(CACHED_REFERENCES))
    wave = np.zeros(8, np.float32)
    cases = [(f"{'m' * length}-{model}", pad) for model in "ab" for pad in ("right", "left")]
    for _ in range(2):
        for number, (name, pad) in enumerate(cases, 1):
            model: Any = SimpleNamespace(name=name)
            assert (await encode(context, model, wave, pad)).item() == number
    assert [(request.model, request.pad) for request in engine.asked] == cases
