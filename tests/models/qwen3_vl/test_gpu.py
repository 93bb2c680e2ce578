"""The golden prompts of both kinds through the CUDA kernels and real graphs."""

from __future__ import annotations

from functools import cache, partial

import pytest
import torch

from models.interfaces.capturable import Bucket
from models.qwen3_vl.model import Qwen3VL, load_model
from tests.models.qwen3_vl.golden import BOTH, CPU, Golden
from tests.support.chat_golden import encode, generate, largest_difference, rounding_error
from tests.support.encoder_replay import CapturedEncoder, bytes_of_nan
from tests.support.inference import no_gradients as no_gradients
from tests.support.logits_engine import LogitsEngine
from tests.support.routes import replayed_if_captured as replayed_if_captured

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
PROMPTS = [pytest.param(golden, name, id=f"{kind}-{name}") for kind, golden in BOTH.items() for name in golden.prompts]
EITHER = [pytest.param(golden, id=kind) for kind, golden in BOTH.items()]
REFERENCE_FACTOR = 1.5
LARGEST: Bucket = {"patches": 512, "sequences": 16, "max_seqlen": 512}
SMALLER: Bucket = {"patches": 256, "sequences": 8, "max_seqlen": 256}


@cache
def model(golden: Golden, device: torch.device, dtype: torch.dtype) -> Qwen3VL:
    return load_model(golden.directory, device, dtype)


@pytest.mark.parametrize("chunk", [None, 1], ids=["whole", "rows one by one"])
@pytest.mark.parametrize(("golden", "name"), PROMPTS)
def test_float32(golden: Golden, name: str, chunk: int | None) -> None:
    """A chunk of one row, a picture's too, takes the route of vectors."""
    ids = golden.expected[f"prompt.{name}.generated_ids"].tolist()
    made = model(golden, CUDA, torch.float32)
    logits, steps, _ = generate(made, golden.prompt(name), len(ids), chunk=chunk, forced=ids)
    expected = golden.expected[f"prompt.{name}.logits"]
    assert largest_difference(logits[-len(expected) :], expected) <= 1e-4
    assert largest_difference(steps, golden.expected[f"prompt.{name}.generated_logits"]) <= 1e-4


@pytest.mark.parametrize("golden", EITHER)
def test_bfloat16_embeddings_and_features_are_as_close_as_their_reference(golden: Golden) -> None:
    for name in golden.names:
        ours, host = (
            encode(model(golden, device, torch.bfloat16).encoder, [golden.item(name)], device) for device in (CUDA, CPU)
        )
        reference = golden.embeds(name)
        assert rounding_error(ours, reference) <= REFERENCE_FACTOR * rounding_error(host, reference), name


@pytest.mark.parametrize("golden", EITHER)
def test_bfloat16_packs_are_as_close_as_their_reference(golden: Golden) -> None:
    for pack in packs(golden):
        ours, host = (
            encode(model(golden, device, torch.bfloat16).encoder, [golden.item(name) for name in pack], device)
            for device in (CUDA, CPU)
        )
        reference = torch.cat([golden.embeds(name) for name in pack])
        assert rounding_error(ours, reference) <= REFERENCE_FACTOR * rounding_error(host, reference), pack


def packs(golden: Golden) -> list[list[str]]:
    """Two and three neighbours of the fixture's items."""
    return [golden.names[i : i + size] for size in (2, 3) for i in range(len(golden.names) - size + 1)]


@pytest.mark.parametrize(("golden", "name"), PROMPTS)
def test_bfloat16_logits_are_as_close_as_their_reference(golden: Golden, name: str) -> None:
    """Of the mixture the middle one of all tokens counts: where two experts score nearly the same, rounding decides
    which is taken, and that token's logits move by more than all other rounding together."""
    ids = golden.expected[f"prompt.{name}.generated_ids"].tolist()
    ours, host = (
        generate(model(golden, device, torch.bfloat16), golden.prompt(name), len(ids), forced=ids)
        for device in (CUDA, CPU)
    )
    for part, mine, plain in zip(("logits", "generated_logits"), ours, host, strict=False):
        reference = golden.expected[f"prompt.{name}.{part}"]
        error, host_error = (logits[-len(reference) :].float().cpu() - reference for logits in (mine, plain))
        if golden is BOTH["mixture"]:
            error, host_error = (one.norm(dim=-1).median() for one in (error, host_error))
        assert error.norm() <= REFERENCE_FACTOR * host_error.norm(), part


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("golden", EITHER)
def test_replay_equals_eager_on_a_poisoned_pool(golden: Golden, dtype: torch.dtype) -> None:
    captured = CapturedEncoder(load_model(golden.directory, CUDA, dtype).encoder, [SMALLER, LARGEST], CUDA)
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    mixes = [[golden.item(name) for name in names] for names in [*([name] for name in golden.names), *packs(golden)]]
    for rows, plain in captured.replays_on_a_poisoned_pool(mixes, partial(bytes_of_nan, captured.encoder, LARGEST)):
        assert rows.isfinite().all()
        assert largest_difference(rows[: len(plain)].float(), plain.float()) <= tolerance


@pytest.mark.usefixtures("replayed_if_captured")
@pytest.mark.parametrize("max_step_tokens", [512, 48, 13])
@pytest.mark.parametrize("golden", EITHER)
def test_the_engine_with_real_graphs(golden: Golden, max_step_tokens: int) -> None:
    """Whole prompts are replayed, with features and without, and so are chunks that cut pictures."""
    engine = LogitsEngine(
        model(golden, CUDA, torch.float32),
        golden.processor,
        device="cuda",
        num_pages=1024,
        max_step_tokens=max_step_tokens,
    )
    for name in golden.prompts:
        engine.submit(name, golden.prompt(name), max_tokens=golden.inputs["max_new_tokens"], logprobs=0)
        if max_step_tokens == 512:
            engine.run()
    engine.run()
    for name in golden.prompts:
        expected = golden.expected[f"prompt.{name}.generated_logits"]
        assert engine.tokens(name) == golden.expected[f"prompt.{name}.generated_ids"].tolist()
        rows = engine.rows(name, len(expected))
        assert largest_difference(rows, expected[:, : rows.shape[1]]) <= 1e-4
    kinds = engine.steps()
    assert kinds["decode", "replay", "captured"]
    if max_step_tokens < 512:
        assert ("cached_prefill", "replay") in engine.routes(), kinds
        assert not {("prefill", "eager"), ("mixed", "eager")} & engine.routes(), kinds
    else:
        # Both kinds of captured prefills hold a whole prompt; either may be replayed.
        assert kinds["prefill", "replay", "captured"] + kinds["cached_prefill", "replay", "captured"], kinds
