"""The decoder against transformers on tiny random checkpoints of every form it takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from models.checkpoints.checkpoint import load_parameters
from models.checkpoints.published import read_config
from models.interfaces.errors import CheckpointError
from models.layers.block import ExpertsConfig
from models.layers.decoder import CausalDecoder, DecoderConfig, decoder_ignored, decoder_rules
from tests.support.paged import PagedCache

SHAPE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_theta": 5e4,
}
LONGROPE = {
    "rope_type": "longrope",
    "factor": 1.0,
    "long_factor": [1.0 + 0.3 * j for j in range(8)],
    "short_factor": [1.0 + 0.2 * j for j in range(8)],
    "original_max_position_embeddings": 66,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
FORMS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("Llama", {}, {}),
    "llama_tied": ("Llama", {"tie_word_embeddings": True}, {}),
    "qwen2": ("Qwen2", {}, {"qkv_bias": True}),
    "qwen3": ("Qwen3", {"head_dim": 16}, {"qk_norm": True}),
    "yarn": ("Qwen3", {"rope_scaling": YARN}, {"qk_norm": True}),
    "yarn_of_all_fields": (
        "Qwen2",
        {"rope_scaling": {**YARN, "beta_fast": 3.0, "beta_slow": 0.5, "attention_factor": 1.3, "truncate": False}},
        {"qkv_bias": True},
    ),
    "minicpm4": ("Llama", {"head_dim": 16, "rope_scaling": LONGROPE}, {}),
}
"""By name: the published classes' family, fields of the config, and arguments of ours."""


@torch.no_grad()
def reference(form: str, directory: Path) -> torch.nn.Module:
    family, extra, _ = FORMS[form]
    config_class = getattr(transformers, f"{family}Config")
    model_class = getattr(transformers, f"{family}ForCausalLM")
    torch.manual_seed(0)
    model = model_class(config_class(**{**SHAPE, **extra})).eval()
    for name, parameter in model.named_parameters():
        parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
    model.save_pretrained(directory)
    return model


def load(form: str, directory: Path) -> CausalDecoder:
    config = DecoderConfig.from_published(read_config(directory), **FORMS[form][2])
    with torch.device("meta"):
        root = torch.nn.ModuleDict({"decoder": CausalDecoder(config)})
    load_parameters(
        root,
        directory,
        decoder_rules(config),
        device=torch.device("cpu"),
        dtype=torch.float32,
        ignore=decoder_ignored(config),
    )
    decoder = root["decoder"]
    assert isinstance(decoder, CausalDecoder)
    return decoder


@pytest.mark.parametrize("form", FORMS)
def test_logits_equal_transformers_in_chunks_and_batches(form: str, tmp_path: Path) -> None:
    model, decoder = reference(form, tmp_path), load(form, tmp_path)
    first, second = torch.randint(61, (19,)), torch.randint(61, (11,))
    with torch.no_grad():
        expected = [model(ids[None]).logits[0] for ids in (first, second)]
    cache = PagedCache(decoder.cache_specs(), num_pages=12, page_size=4)
    sequences = [cache.new_sequence(19), cache.new_sequence(11)]
    got: list[list[torch.Tensor]] = [[], []]
    # Whole chunk, then both as chunks with and without cached context, then decode rows.
    steps = [([], {0: 9}), ([], {0: 8, 1: 5}), ([0], {}), ([], {1: 5}), ([0, 1], {})]
    for decodes, prefills in steps:
        counts = {**dict.fromkeys(decodes, 1), **prefills}
        starts = {index: sequences[index].length for index in counts}
        batch = cache.batch(
            [sequences[index] for index in decodes], [(sequences[index], count) for index, count in prefills.items()]
        )
        ids = torch.cat([(first, second)[index][starts[index] : starts[index] + counts[index]] for index in counts])
        positions = torch.cat([torch.arange(starts[index], starts[index] + counts[index]) for index in counts])
        logits = decoder.logits(decoder(decoder.embed(ids), positions[None], batch))
        for index, rows in zip(counts, logits.split(list(counts.values())), strict=True):
            got[index].append(rows)
    for rows, reference_logits in zip(got, expected, strict=True):
        torch.testing.assert_close(torch.cat(rows), reference_logits, atol=1e-4, rtol=0)


def test_heads_without_a_size_in_the_file_have_that_of_the_published_class() -> None:
    config = {**SHAPE, "rms_norm_eps": 1e-6}
    mixture = ExpertsConfig(count=4, top_k=2, intermediate_size=8)
    assert DecoderConfig.from_published(config).block.head_dim == 12
    assert DecoderConfig.from_published(config, qk_norm=True).block.head_dim == transformers.Qwen3Config().head_dim
    assert DecoderConfig.from_published(config, qk_norm=True, experts=mixture).block.head_dim == 12


def test_positions_of_three_axes_may_be_stretched() -> None:
    """As the publisher recommends it for prompts beyond the trained length."""
    stretched = {**YARN, "type": "yarn", "mrope_section": [1, 2, 3]}
    config = DecoderConfig.from_published({**SHAPE, "rms_norm_eps": 1e-6, "rope_scaling": stretched})
    plain = DecoderConfig.from_published({**SHAPE, "rms_norm_eps": 1e-6, "rope_scaling": YARN})
    assert config == replace(plain, mrope_section=(1, 2, 3)) and config.scaling is not None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "type 'dynamic'"),
        ({"rope_scaling": {**YARN, "mscale": 1.0}}, "mscale of a rope_scaling of type 'yarn'"),
        ({"rope_scaling": {**YARN, "type": "default"}}, "rope_type is 'yarn', but type, its older name, is 'default'"),
        ({"rope_scaling": {"type": "yarn"}}, "field 'factor' is missing"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [1, 2, 4]}}, "must sum to 6"),
        ({"hidden_size": None}, "hidden_size"),
        ({"rope_scaling": {**LONGROPE, "original_max_position_embeddings": 63}}, "factors that change with the length"),
        ({"rope_scaling": {**LONGROPE, "attention_factor": 1.2}}, "attention_factor"),
        ({"rope_scaling": {**LONGROPE, "mrope_section": [2, 2, 2]}}, "type 'longrope' is not supported"),
    ],
)
def test_unsupported_configs_are_refused(change: dict[str, Any], message: str) -> None:
    config = {**SHAPE, "rms_norm_eps": 1e-6, **change}
    config = {key: value for key, value in config.items() if value is not None}
    with pytest.raises(CheckpointError, match=message):
        DecoderConfig.from_published(config)
