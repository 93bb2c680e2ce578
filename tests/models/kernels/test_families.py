"""Whole networks of every family by kernels, at widths that kernels take, against their references.

The goldens are narrower, so that many of their products go to cuBLAS on a GPU. Biases are drawn, too: published
checkpoints have them, and those of random weights are zeros.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from models.checkpoints.registry import family_of, resolve
from models.protocol import ChatModel, Decoder
from models.voxcpm2.model import VoxCPM2
from models.voxcpm2.model import load_model as load_voice
from tests.models.kernels.checking import CPU, by_kernels, relative_error
from tests.models.voxcpm2.golden import MODES, utterance
from tests.support.chat_golden import encode
from tests.support.golden import GOLDEN
from tests.support.inference import no_gradients as no_gradients
from tests.support.paged import PagedCache
from tests.support.speech import SpeechRig

LIMIT = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1}
# A third layer would be called as the second one is, in towers, too. Kimi-VL's first has no experts.
_TEXT = {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 256} | _HEADS
_TOWER = {"depth": 2, "hidden_size": 128, "intermediate_size": 256, "num_heads": 2, "out_hidden_size": 256}
_WINDOWS = {"fullatt_block_indexes": [1]}
_DEEPSTACK = {"deepstack_visual_indexes": [0, 1]}
_QWEN3 = _TEXT | {"head_dim": 128, "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20]}}
_MROPE = {"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
_SIGLIP = {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2}
_LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
# Routers choose all experts: rounding could make them choose others.
_KIMI = {"num_hidden_layers": 3, "num_key_value_heads": 2, "moe_intermediate_size": 128, "num_experts_per_tok": 8}
_QWEN3_5 = _TEXT | {
    "head_dim": 256, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 1,
    "linear_num_value_heads": 2, "linear_key_head_dim": 128, "linear_value_head_dim": 64,
    "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25}
    | {"rope_theta": 10000000, "rope_type": "default"},
}  # fmt: skip
WIDTHS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (_TEXT | _MROPE, {"depth": 2, "hidden_size": 256, "embed_dim": 128, "num_heads": 2}),
    "qwen2_5_vl": (_TEXT | _MROPE, _TOWER | _WINDOWS),
    "qwen3_vl": (_QWEN3, _TOWER | _DEEPSTACK),
    "qwen3_vl_moe": (_QWEN3 | {"moe_intermediate_size": 128, "num_experts_per_tok": 8}, _TOWER | _DEEPSTACK),
    "qwen3_5": (_QWEN3_5, _TOWER),
    "qwen3_5_moe": (
        _QWEN3_5 | {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128, "num_experts_per_tok": 8},
        _TOWER,
    ),
    "minicpmv_2_5": (_TEXT, _SIGLIP),
    "minicpmv_4_5": (_TEXT | {"head_dim": 128}, _SIGLIP),
    "kimi_vl": (_TEXT | _LATENT | _KIMI, _SIGLIP),
}
"""Fields of the language model's config and of the tower's, by the golden directory that has the others."""


def widened(name: str, target: Path) -> Path:
    """The golden directory without its weights, and with other widths."""
    for path in (GOLDEN / name).glob("*"):
        if path.is_file() and path.suffix != ".safetensors" and "index" not in path.name:
            shutil.copy(path, target)
    config = json.loads((target / "config.json").read_text())
    text, tower = WIDTHS[name]
    config.get("text_config", config).update(text)
    config["vision_config"].update(tower)
    (target / "config.json").write_text(json.dumps(config))
    return target


def modules_of(model: ChatModel) -> Iterator[nn.Module]:
    for part in (model.encoder, model.decoder):
        assert isinstance(part, nn.Module)
        yield part


def models(directory: Path, device: torch.device) -> tuple[ChatModel, ChatModel]:
    """With the same weights, biases among them, and buffers: in 16 bits on `device`, and in float32."""
    load = resolve(family_of(directory).model)
    narrow, wide = load(directory, device, torch.bfloat16, "random"), load(directory, CPU, torch.float32, "random")
    for part, other in zip(modules_of(narrow), modules_of(wide), strict=True):
        if device == CPU:
            to_float16(part)
        for (name, mine), theirs in zip(part.named_parameters(), other.parameters(), strict=True):
            if name.endswith("bias"):
                mine.normal_(0, 0.3)
            theirs.copy_(mine)
        # Constants that `prepare` made of the weights (MiniCPM-V's queries): a GPU draws others than a CPU.
        for mine, theirs in zip(part.buffers(), other.buffers(), strict=True):
            theirs.copy_(mine)
    return narrow, wide


def to_float16(module: nn.Module) -> None:
    """Of everything in bfloat16, whose arithmetic Triton's interpreter does not have."""
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.dtype == torch.bfloat16:
            tensor.data = tensor.data.half()
    for part in module.modules():
        vars(part).update({name: torch.float16 for name, value in vars(part).items() if value is torch.bfloat16})


def logits_of(decoder: Decoder, prompts: Sequence[int], device: torch.device, dtype: torch.dtype) -> dict[str, Tensor]:
    """Of prompts of these lengths in one pass, and of a decode step behind each of them unless it is [1]: that step
    would be called as the one behind [7] is."""
    states = decoder.state_specs()
    cache = PagedCache(decoder.cache_specs(), 128, state_specs=states, num_states=20, device=device, dtype=dtype)
    sequences = [cache.new_sequence(length + 1) for length in prompts]

    def step(ids: Tensor, positions: Tensor, batch: Any) -> Tensor:
        positions = positions.to(device).expand(decoder.position_axes, -1)
        return decoder.logits(decoder.forward(decoder.embed(ids.to(device)), positions, batch))

    ids, ends = torch.arange(sum(prompts)) % 97 + 5, torch.tensor(prompts)
    positions = torch.cat([torch.arange(length) for length in prompts])
    found = {"prefill": step(ids, positions, cache.batch(prefills=list(zip(sequences, prompts, strict=True))))}
    if prompts != [1]:
        found["decode"] = step(ends % 97, ends, cache.batch(decodes=sequences))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", WIDTHS)
def test_networks_by_kernels_equal_their_references(name: str, device: torch.device, tmp_path: Path) -> None:
    directory = widened(name, tmp_path)
    narrow, wide = models(directory, device)
    dtype = torch.float16 if device == CPU else torch.bfloat16
    errors: dict[str, float] = {}
    processor = resolve(family_of(directory).processor)(directory)
    rng = np.random.default_rng(0)
    for width, height in ((56, 56), (140, 112)):
        item = processor.image(Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)))
        with by_kernels(device):
            embeds = encode(narrow.encoder, [item], device)
        errors[f"{width} x {height}"] = relative_error(embeds, encode(wide.encoder, [item], CPU))
    # One row is a vector; up to 64 are streamed; of more the tiles differ.
    for prompts in ([1], [7], [3, 66], [1] * 17):
        with by_kernels(device):
            found = logits_of(narrow.decoder, prompts, device, dtype)
        for kind, expected in logits_of(wide.decoder, prompts, CPU, torch.float32).items():
            errors[f"{kind} {prompts[:4]}"] = relative_error(found[kind], expected)
    assert max(errors.values()) < LIMIT[dtype], errors


SPEECH: dict[str, Any] = {
    "lm_config": {"num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 256}
    | {"num_attention_heads": 2, "num_key_value_heads": 1}
    | {"kv_channels": 128, "rope_scaling": {"long_factor": [1.5] * 64, "short_factor": [1.0] * 64}},
    "encoder_config": {"hidden_dim": 256, "ffn_dim": 256, "num_heads": 2, "num_layers": 2, "kv_channels": 128},
    "dit_config": {"hidden_dim": 256, "ffn_dim": 256, "num_heads": 2, "num_layers": 2, "kv_channels": 128},
    # So fine that rounding changes little.
    "scalar_quantization_scale": 4096,
}


def spoken(model: VoxCPM2, device: torch.device, before: Tensor | None) -> dict[str, Tensor]:
    """Conditioning of four prompts, their first patches, and those behind the patches `before` (None: the first)."""
    rig = SpeechRig(model, device=device.type)
    for slot, mode in enumerate(MODES, start=1):
        rig.admit(slot, utterance(mode))
    slots, conditioning = rig.prefill(dict.fromkeys(range(1, 5), -1))
    first = rig.tail(slots, conditioning, steps=3)["patch"].clone()
    rig.state["last_patch"][slots] = (first if before is None else before).to(rig.state["last_patch"])
    return {"conditioning": conditioning, "first": first, "next": rig.decode(slots, steps=3)["patch"]}


@pytest.mark.slow
def test_a_voice_by_kernels_equals_its_reference(device: torch.device, tmp_path: Path) -> None:
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(GOLDEN / "voxcpm2" / file, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for name, values in SPEECH.items():
        config[name] = deep(config[name], values)
    (tmp_path / "config.json").write_text(json.dumps(config))
    narrow = load_voice(tmp_path, device, torch.bfloat16, "random")
    wide = load_voice(tmp_path, CPU, torch.float32, "random")
    if device == CPU:
        to_float16(narrow.network)
        vars(narrow).update({name: torch.float16 for name, value in vars(narrow).items() if value is torch.bfloat16})
    for mine, theirs in zip(narrow.network.parameters(), wide.network.parameters(), strict=True):
        theirs.copy_(mine)
    expected = spoken(wide, CPU, None)
    with by_kernels(device):
        found = spoken(narrow, device, expected["first"])
    errors = {name: relative_error(found[name], expected[name]) for name in expected}
    limit = LIMIT[torch.float16 if device == CPU else torch.bfloat16]
    assert errors.pop("conditioning") < limit
    # Guided solver steps multiply the differences of their velocities.
    assert max(errors.values()) < 4 * limit, errors


def deep(base: Any, values: Any) -> Any:
    if not isinstance(values, dict):
        return values
    return base | {name: deep(base.get(name), value) if name in base else value for name, value in values.items()}
