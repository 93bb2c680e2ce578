"""`quantization="fp8"` in every chat family: which weights are in e4m3, from which values, and what answers become."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from models.checkpoints.registry import family_of, resolve
from models.layers.quantized import COLUMNS, E4M3, QuantizedLinear, QuantizedWeight
from tests.models.families.family import Family, families
from tests.support.chat_golden import generate, golden_prompt, rounding_error
from tests.support.golden import GOLDEN, inputs, is_chat, prompts, read_json
from tests.support.inference import no_gradients as no_gradients
from tests.support.inline_engine import InlineEngine
from tests.support.slow import slow

CPU = torch.device("cpu")
QUICK = ("qwen2_vl", "qwen3_vl_moe")
EMBEDDED = Path(__file__).parents[2] / "models/embedded/qwen2_vl"
CHAT = [
    EMBEDDED,
    *(folder for config in sorted(GOLDEN.glob("*/config.json")) if is_chat(family_of(folder := config.parent))),
]


REFERENCE_FACTOR = 1.5


def loaded(directory: Path, device: torch.device = CPU, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    return resolve(family_of(directory).model)(directory, device, dtype, "published", **options)


@pytest.mark.parametrize(
    "directory", [path if path.name in QUICK else slow(path) for path in CHAT], ids=lambda path: path.name
)
def test_all_but_what_is_named_is_made_from_the_published_weights(directory: Path) -> None:
    plain, quantised = loaded(directory), loaded(directory, quantization="fp8")
    stored = {name: part for name, part in quantised.decoder.named_modules() if isinstance(part, QuantizedWeight)}
    assert stored
    for name, part in stored.items():
        published = plain.decoder.get_parameter("embed_tokens.weight" if name == "tied_head" else name).double()
        allowed = torch.maximum(published.abs() / 16, part.scale.double() * 2**-10) * (1 + 2**-20)
        assert ((part.dequantised(torch.float64) - published).abs() <= allowed).all(), name
        assert part.values.dtype == E4M3 and part.scale.dtype == torch.float32
    left = [
        name
        for name, part in quantised.decoder.named_modules()
        if isinstance(part, nn.Linear) and not isinstance(part, QuantizedLinear)
    ]
    odd = quantised.decoder.embed_tokens.weight.shape[0] % COLUMNS
    narrow = ("kv_up", "in_ba", "shared_gate")
    assert all(name.endswith(narrow) or (name == "head" and odd) for name in left), left
    assert not any(isinstance(part, QuantizedWeight) for part in quantised.encoder.modules())
    same = dict(plain.named_parameters())
    for name, parameter in quantised.named_parameters():
        if name in same:
            assert torch.equal(parameter, same[name]), name


def test_a_tied_head_is_a_copy_and_the_embeddings_stay() -> None:
    quantised = loaded(EMBEDDED, quantization="fp8")
    assert quantised.decoder.head is None
    assert quantised.decoder.tied_head.shape == quantised.decoder.embed_tokens.weight.shape
    assert quantised.decoder.embed_tokens.weight.dtype == torch.float32


@pytest.mark.parametrize("family", families("qwen2_vl", "qwen3_5", quick=("qwen2_vl",)))
def test_replayed_and_eager_steps_are_alike(family: Family) -> None:
    """Several requests together, prefills in chunks."""
    model = loaded(family.directory, quantization="fp8")
    found: dict[bool, dict[str, tuple[list[int], np.ndarray]]] = {}
    for graphs in (True, False):
        engine = InlineEngine(model, family.processor, graphs=graphs, num_pages=1024, max_step_tokens=37)
        for name in family.prompts:
            engine.submit(name, family.prompt(name), max_tokens=family.tokens, logprobs=2)
        engine.run()
        assert not engine.failures()
        assert (("decode", "replay") in engine.routes()) == graphs
        found[graphs] = {name: (engine.tokens(name), engine.log_probabilities(name)) for name in family.prompts}
    for (tokens, log_probabilities), (others, expected) in zip(
        found[True].values(), found[False].values(), strict=True
    ):
        assert tokens == others and np.abs(log_probabilities - expected).max() <= 1e-4


def with_all_experts(directory: Path, parent: Path) -> Path:
    """The same checkpoint, whose router takes all experts of a mixture: if it chose some, rounding could choose others,
    and the logits of most tokens would be about the choice."""
    config = read_json(directory, "config.json")
    text = config.get("text_config", config)
    experts = text.get("num_experts", text.get("n_routed_experts"))
    if experts is None:
        return directory
    for file in directory.iterdir():
        (parent / file.name).symlink_to(file)
    (parent / "config.json").unlink()
    text["num_experts_per_tok"] = experts
    (parent / "config.json").write_text(json.dumps(config))
    return parent


@pytest.mark.gpu
@pytest.mark.parametrize("directory", CHAT[1:], ids=lambda path: path.name)
def test_on_a_gpu_logits_are_as_close_as_their_reference(directory: Path, tmp_path: Path) -> None:
    """To the same e4m3 weights in float32: the prompt's logits, and those of the tokens that these choose. The
    reference rounds to bfloat16, or also activations of more than 64 rows to e4m3, whichever costs more."""
    from benchmarks.quantization import eight_bit_prefills  # which imports the trainings

    directory = with_all_experts(directory, tmp_path)
    processor = resolve(family_of(directory).processor)(directory)
    prompt, limit = golden_prompt(processor, directory, prompts(directory)[0]), inputs(directory)["max_new_tokens"]
    model = loaded(directory, quantization="fp8")
    *exact, ids = generate(model, prompt, limit)

    def errors(device: torch.device) -> list[float]:
        made = generate(loaded(directory, device, torch.bfloat16, quantization="fp8"), prompt, limit, forced=ids)
        return [rounding_error(mine.cpu(), wanted) for mine, wanted in zip(made[:2], exact, strict=True)]

    host = errors(CPU)
    with eight_bit_prefills():
        host = [max(pair) for pair in zip(host, errors(CPU), strict=True)]
    for part, ours, plain in zip(("prompt", "steps"), errors(torch.device("cuda")), host, strict=True):
        assert ours <= REFERENCE_FACTOR * plain, part
