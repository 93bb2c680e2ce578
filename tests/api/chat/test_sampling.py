"""Fields of a chat request become SamplingParams of the engine."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from service.api.chat.job import derived_seed, sampling_params
from service.api.chat.schema import ChatRequestBody
from service.api.http.errors import ApiError
from service.link.sampling import SamplingParams
from service.settings.settings import load_settings
from tests.support.fake_chat import END, FakeProcessor

SETTINGS = load_settings()


def params(
    prompt_tokens: int = 10,
    processor: Any = None,
    settings: Any = SETTINGS,
    max_model_len: int = FakeProcessor.context_length,
    **fields: Any,
) -> SamplingParams:
    body = msgspec.convert({"model": "m", "messages": [{"role": "user", "content": "x"}], **fields}, ChatRequestBody)
    return sampling_params(body, processor or FakeProcessor(), prompt_tokens, max_model_len, settings)


def test_omitted_fields_follow_the_checkpoint_then_openai() -> None:
    processor = FakeProcessor()
    processor.generation_defaults = {"temperature": 0.3, "top_k": 20, "repetition_penalty": 1.1}
    chosen = params(processor=processor)
    assert (chosen.temperature, chosen.top_k, chosen.repetition_penalty, chosen.top_p) == (0.3, 20, 1.1, 1.0)
    chosen = params(processor=processor, temperature=0, top_k=-1, repetition_penalty=1, top_p=0.2)
    assert (chosen.temperature, chosen.top_k, chosen.repetition_penalty, chosen.top_p) == (0.0, -1, 1.0, 0.2)


def test_the_answer_ends_at_the_contexts_end() -> None:
    context = FakeProcessor.context_length
    assert params(10).max_tokens == context - 10
    assert params(context - 3, max_tokens=100).max_tokens == 3
    assert params(10, max_tokens=100, max_completion_tokens=7).max_tokens == 7
    settings = load_settings({"max_output_tokens": 50})
    assert params(settings=settings).max_tokens == 50
    assert params(settings=settings, max_tokens=100).max_tokens == 50
    with pytest.raises(ApiError, match="min_tokens: too high: 60 given, the completion can have at most 50 tokens"):
        params(settings=settings, min_tokens=60)
    with pytest.raises(ApiError, match=f"this model's maximum context length is {context} tokens;") as refusal:
        params(context)
    assert (refusal.value.status, refusal.value.code) == (400, "context_length_exceeded")
    assert params(10, max_model_len=100).max_tokens == 90
    with pytest.raises(ApiError, match="context length is 100 tokens, which is what the KV cache holds"):
        params(100, max_model_len=100)


def test_a_temperature_that_logits_cannot_be_divided_by_is_none() -> None:
    assert params(temperature=1e-40).temperature == params(temperature=1e-6).temperature == 0
    assert params(temperature=1e-5).temperature == 1e-5


def test_stop_tokens_are_the_models_and_the_requests() -> None:
    assert params().stop_token_ids == (END,)
    assert params(stop_token_ids=[65]).stop_token_ids == (65, END)
    assert params(ignore_eos=True, stop_token_ids=[65]).stop_token_ids == (65,)


def test_each_choice_has_a_seed_derived_from_the_first() -> None:
    assert params(seed=-5).seed == -5 and params().seed != params().seed
    assert derived_seed(7, 0) == 7
    seeds = [derived_seed(7, index) for index in range(100)]
    assert len(set(seeds)) == 100 and all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert derived_seed(7, 3) == derived_seed(7, 3) != derived_seed(8, 3)
