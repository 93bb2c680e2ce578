"""`quantization="fp8"` in every chat family: which weights are in e4m3, from which values, and what answers become."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from models.layers.e4m3 import COLUMNS, E4M3, E4M3Linear, E4M3Weight
from models.registry import family_of, resolve
from tests.engine.chat.test_chat_golden import PROMPTS, TOKENS, processor, prompt
from tests.models.qwen2_vl.golden import DIRECTORY, load_model
from tests.support.golden import GOLDEN
from tests.support.inference import no_gradients as no_gradients
from tests.support.logits_engine import LogitsEngine

CPU = torch.device("cpu")
EMBEDDED = Path(__file__).parents[2] / "models/embedded/qwen2_vl"
CHAT = [
    EMBEDDED,
    *(folder for config in sorted(GOLDEN.glob("*/config.json")) if family_of(folder := config.parent).kind == "chat"),
]


def loaded(directory: Path, **options: Any) -> Any:
    return resolve(family_of(directory).model)(directory, CPU, torch.float32, "published", **options)


@pytest.mark.parametrize("directory", CHAT, ids=lambda path: path.name)
def test_all_but_what_is_named_is_made_from_the_published_weights(directory: Path) -> None:
    plain, quantised = loaded(directory), loaded(directory, quantization="fp8")
    stored = {name: part for name, part in quantised.decoder.named_modules() if isinstance(part, E4M3Weight)}
    assert stored
    for name, part in stored.items():
        published = plain.decoder.get_parameter("embed_tokens.weight" if name == "tied_head" else name).double()
        allowed = torch.maximum(published.abs() / 16, part.scale.double()[..., None] * 2**-10) * (1 + 2**-20)
        assert ((part.multiplied_out(torch.float64) - published).abs() <= allowed).all(), name
        assert part.values.dtype == E4M3 and part.scale.dtype == torch.float32
    left = [
        name
        for name, part in quantised.decoder.named_modules()
        if isinstance(part, nn.Linear) and not isinstance(part, E4M3Linear)
    ]
    odd = quantised.decoder.embed_tokens.weight.shape[0] % COLUMNS
    assert all(name.endswith("kv_up") or (name == "head" and odd) for name in left), left
    assert not any(isinstance(part, E4M3Weight) for part in quantised.encoder.modules())
    same = dict(plain.named_parameters())
    for name, parameter in quantised.named_parameters():
        if name in same:
            assert torch.equal(parameter, same[name]), name


def test_a_tied_head_is_a_copy_and_the_embeddings_stay() -> None:
    quantised = loaded(EMBEDDED, quantization="fp8")
    assert quantised.decoder.head is None
    assert quantised.decoder.tied_head.shape == quantised.decoder.embed_tokens.weight.shape
    assert quantised.decoder.embed_tokens.weight.dtype == torch.float32


def test_replayed_and_eager_steps_are_alike() -> None:
    """Several requests together, prefills in chunks."""
    model = load_model(DIRECTORY, CPU, torch.float32, "published", "fp8")
    rows: dict[bool, dict[str, Tensor]] = {}
    tokens: dict[bool, dict[str, list[int]]] = {}
    for graphs in (True, False):
        engine = LogitsEngine(model, processor(), graphs=graphs, max_step_tokens=37)
        for name in PROMPTS:
            engine.submit(name, prompt(name), max_tokens=TOKENS, logprobs=2)
        engine.run()
        assert not engine.failures()
        assert (("decode", "replay") in engine.routes()) == graphs
        rows[graphs] = {name: engine.rows(name, TOKENS) for name in PROMPTS}
        tokens[graphs] = {name: engine.tokens(name) for name in PROMPTS}
    assert tokens[True] == tokens[False]
    for name in PROMPTS:
        assert (rows[True][name] - rows[False][name]).abs().max() <= 1e-4
