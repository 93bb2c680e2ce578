"""Strict loading: the 5,679 published tensors at full size, their refusals, and host memory over shards."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from models.checkpoints import checkpoint, weight_files
from models.checkpoints.registry import family_of
from models.interfaces.errors import CheckpointError
from models.kimi_vl.config import TextConfig, VisionConfig, load_config
from models.kimi_vl.model import KimiVLModel, load_model
from tests.models.kimi_vl.golden import DIRECTORY, PUBLISHED_TEXT, PUBLISHED_VISION, item, processor, write_config
from tests.support.chat_golden import encode

CPU, META = torch.device("cpu"), torch.device("meta")
Shape = tuple[int, ...]


def published_tensors(text: TextConfig, vision: VisionConfig) -> dict[str, Shape]:
    """Names and shapes of a published checkpoint, written down from its index and not from the rules."""
    width, inner = vision.hidden_size, vision.intermediate_size
    shapes: dict[str, Shape] = {
        "vision_tower.patch_embed.proj.weight": (width, 3, 14, 14),
        "vision_tower.patch_embed.proj.bias": (width,),
        "vision_tower.patch_embed.pos_emb.weight": (vision.init_pos_emb_height, vision.init_pos_emb_width, width),
        "multi_modal_projector.linear_1.weight": (4 * width, 4 * width),
        "multi_modal_projector.linear_1.bias": (4 * width,),
        "multi_modal_projector.linear_2.weight": (text.hidden_size, 4 * width),
        "multi_modal_projector.linear_2.bias": (text.hidden_size,),
    }
    norms = ["vision_tower.encoder.final_layernorm", "multi_modal_projector.pre_norm"]
    for index in range(vision.num_hidden_layers):
        block = f"vision_tower.encoder.blocks.{index}."
        norms += [f"{block}norm0", f"{block}norm1"]
        for name, rows, columns in (
            ("wqkv", 3 * width, width),
            ("wo", width, width),
            ("mlp.fc0", inner, width),
            ("mlp.fc1", width, inner),
        ):
            shapes |= {f"{block}{name}.weight": (rows, columns), f"{block}{name}.bias": (rows,)}
    for norm in norms:
        shapes |= {f"{norm}.weight": (width,), f"{norm}.bias": (width,)}

    hidden, heads = text.hidden_size, text.num_attention_heads
    shapes |= {
        "language_model.model.embed_tokens.weight": (text.vocab_size, hidden),
        "language_model.lm_head.weight": (text.vocab_size, hidden),
        "language_model.model.norm.weight": (hidden,),
    }
    for index in range(text.num_hidden_layers):
        layer = f"language_model.model.layers.{index}."
        attention, mlp = f"{layer}self_attn.", f"{layer}mlp."
        shapes |= {
            f"{layer}input_layernorm.weight": (hidden,),
            f"{layer}post_attention_layernorm.weight": (hidden,),
            f"{attention}q_proj.weight": (heads * (text.qk_nope_head_dim + text.qk_rope_head_dim), hidden),
            f"{attention}kv_a_proj_with_mqa.weight": (text.kv_lora_rank + text.qk_rope_head_dim, hidden),
            f"{attention}kv_a_layernorm.weight": (text.kv_lora_rank,),
            f"{attention}kv_b_proj.weight": (heads * (text.qk_nope_head_dim + text.v_head_dim), text.kv_lora_rank),
            f"{attention}o_proj.weight": (hidden, heads * text.v_head_dim),
            f"{attention}rotary_emb.inv_freq": (text.qk_rope_head_dim // 2,),
        }
        if index < text.first_k_dense_replace:
            shapes |= swiglu(mlp, hidden, text.intermediate_size)
            continue
        shapes |= {
            f"{mlp}gate.weight": (text.n_routed_experts, hidden),
            f"{mlp}gate.e_score_correction_bias": (text.n_routed_experts,),
        }
        shapes |= swiglu(f"{mlp}shared_experts.", hidden, text.n_shared_experts * text.moe_intermediate_size)
        for expert in range(text.n_routed_experts):
            shapes |= swiglu(f"{mlp}experts.{expert}.", hidden, text.moe_intermediate_size)
    return shapes


def swiglu(prefix: str, width: int, inner: int) -> dict[str, Shape]:
    return {
        f"{prefix}gate_proj.weight": (inner, width),
        f"{prefix}up_proj.weight": (inner, width),
        f"{prefix}down_proj.weight": (width, inner),
    }


class Headers:
    """A sharded checkpoint of headers alone: what is read from it has no memory."""

    def __init__(self, directory: Path, shapes: Mapping[str, Shape], shards: int) -> None:
        names = sorted(shapes)
        self.shapes = dict(shapes)
        self.files = {name: f"model-{index * shards // len(names)}.safetensors" for index, name in enumerate(names)}
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": self.files}))
        for file in set(self.files.values()):
            (directory / file).touch()

    def tensors(self, path: Path) -> Iterator[weight_files.PublishedTensor]:
        for name, file in self.files.items():
            if file == path.name and name in self.shapes:
                shape = self.shapes[name]
                yield weight_files.PublishedTensor(
                    name, shape, "BF16", path, lambda shape=shape: torch.empty(shape, device=META)
                )


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Headers:
    """The full-size checkpoint of seven shards."""
    config = load_config(write_config(tmp_path, text=PUBLISHED_TEXT, vision=PUBLISHED_VISION, limit=4096))
    headers = Headers(tmp_path, published_tensors(config.text, config.vision), shards=7)
    monkeypatch.setattr(weight_files, "tensors", headers.tensors)
    return headers


def padding_of(model: KimiVLModel) -> int:
    """Weights of the patch embedding that no tensor of the files has."""
    weight = model.encoder.patch_embed.weight
    return weight.numel() - len(weight) * model.encoder.config.patch_values


def test_the_published_tensors_load_at_full_size(tmp_path: Path, published: Headers) -> None:
    assert len(published.shapes) == 5679
    model = load_model(tmp_path, META, torch.bfloat16)
    counts = {
        "total": sum(parameter.numel() for parameter in model.parameters()),
        "projector": sum(parameter.numel() for parameter in model.encoder.projector.parameters()),
        "vision": sum(parameter.numel() for parameter in model.encoder.parameters()),
        "language": sum(parameter.numel() for parameter in model.decoder.parameters()),
    }
    counts["vision"] -= counts["projector"]
    padding = padding_of(model)
    counts["total"], counts["vision"] = counts["total"] - padding, counts["vision"] - padding
    assert counts == {
        "total": 16_407_656_048,
        "projector": 30_679_808,
        "vision": 416_866_032,
        "language": 15_960_110_208,
    }
    frequencies = [shape for name, shape in published.shapes.items() if name.endswith("inv_freq")]
    in_files = sum(map(math.prod, published.shapes.values())) - sum(map(math.prod, frequencies))
    assert in_files == counts["total"]
    assert sum(spec.bytes_per_token(torch.bfloat16) for spec in model.decoder.cache_specs()) == 31_104


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("language_model.model.layers.26.mlp.experts.63.down_proj.weight", None),
        ("vision_tower.encoder.blocks.26.wqkv.bias", None),
        ("language_model.model.layers.1.mlp.gate.e_score_correction_bias", (65,)),
        ("language_model.model.layers.7.mlp.experts.9.up_proj.weight", (2048, 1408)),
        ("language_model.model.layers.0.self_attn.q_a_proj.weight", (1536, 2048)),
        ("language_model.model.layers.1.mlp.experts.64.up_proj.weight", (1408, 2048)),
    ],
)
def test_a_changed_tensor_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, published: Headers, name: str, shape: Shape | None
) -> None:
    shapes = {other: had for other, had in published.shapes.items() if other != name}
    changed = Headers(tmp_path, shapes if shape is None else shapes | {name: shape}, shards=7)
    monkeypatch.setattr(weight_files, "tensors", changed.tensors)
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load_model(tmp_path, META, torch.bfloat16)


def test_an_index_over_its_files_is_refused(tmp_path: Path, published: Headers) -> None:
    name = "language_model.model.layers.3.mlp.gate.weight"
    del published.shapes[name]
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load_model(tmp_path, META, torch.bfloat16)


def test_family() -> None:
    assert family_of(DIRECTORY).name == "kimi_vl"


def test_the_golden_checkpoint_has_the_published_names() -> None:
    config = load_config(DIRECTORY)
    shapes = {name: tuple(tensor.shape) for name, tensor in load_file(DIRECTORY / "model.safetensors").items()}
    expected = published_tensors(config.text, config.vision)
    assert {name: shape for name, shape in shapes.items() if not name.endswith("inv_freq")} == {
        name: shape for name, shape in expected.items() if not name.endswith("inv_freq")
    }


def test_the_router_stays_in_float32(tmp_path: Path) -> None:
    """Its bias decides between near ties, whatever dtype the file has."""
    tensors = load_file(DIRECTORY / "model.safetensors")
    name = "language_model.model.layers.1.mlp.gate.e_score_correction_bias"
    for dtype in (torch.float32, torch.bfloat16):
        write_config(tmp_path)
        save_file({**tensors, name: tensors[name].to(dtype)}, tmp_path / "model.safetensors")
        model = load_model(tmp_path, CPU, torch.bfloat16)
        dtypes = {key: value.dtype for key, value in model.named_parameters() if ".router." in key}
        assert set(dtypes.values()) == {torch.float32} and len(dtypes) == 4
        assert torch.equal(model.decoder.layers[1].mlp.router.bias, tensors[name].to(dtype).float())
        assert model.decoder.embed_tokens.weight.dtype == torch.bfloat16


def test_random_weights_make_finite_embeddings_and_logits() -> None:
    with torch.inference_mode():
        model = load_model(DIRECTORY, CPU, torch.float32, "random")
        embeds = encode(model.encoder, [item([(6, 4)])], CPU)
        logits = model.decoder.logits(embeds)
    assert torch.isfinite(logits).all()
    assert embeds.std() > 0.1


SYNTHETIC_TEXT = {
    "vocab_size": 32768,
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "moe_intermediate_size": 512,
    "n_routed_experts": 32,
}
SLACK = 24 << 20


def resident(kind: str) -> int:
    """Bytes of this process: RssAnon or RssFile."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(kind))
    return 1024 * int(line.split()[1])


def test_host_memory_over_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the parameters (here on the host as well) there is one tensor, and the pages of one mapped shard."""
    config = load_config(write_config(tmp_path, text=SYNTHETIC_TEXT))
    shapes = published_tensors(config.text, config.vision)
    groups: dict[str, dict[str, Shape]] = {}
    for name, shape in shapes.items():
        layer = name.split(".")[3] if ".layers." in name else "rest"
        groups.setdefault(layer, {})[name] = shape
    weight_map = {}
    for group, members in groups.items():
        file = f"model-{group}.safetensors"
        save_file(
            {name: torch.full(shape, 0.5, dtype=torch.bfloat16) for name, shape in members.items()}, tmp_path / file
        )
        weight_map |= dict.fromkeys(members, file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    largest_tensor = 2 * max(map(math.prod, shapes.values()))
    largest_shard = max(path.stat().st_size for path in tmp_path.glob("*.safetensors"))

    before = {kind: resident(kind) for kind in ("RssAnon", "RssFile")}
    peak = dict(before)
    fill = checkpoint._fill

    def watched(place: checkpoint._Place, tensor: weight_files.PublishedTensor) -> None:
        fill(place, tensor)
        for kind in peak:
            peak[kind] = max(peak[kind], resident(kind))

    monkeypatch.setattr(checkpoint, "_fill", watched)
    model = load_model(tmp_path, CPU, torch.bfloat16)
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    assert parameters > 200 << 20 and len(groups) >= 4
    assert peak["RssAnon"] - before["RssAnon"] <= parameters + largest_tensor + SLACK
    assert peak["RssFile"] - before["RssFile"] <= largest_shard + SLACK < parameters
    assert sum(int((parameter != 0.5).sum()) for parameter in model.parameters()) == padding_of(model)


def test_a_checkpoint_without_frequencies_loads(tmp_path: Path) -> None:
    """Later writers leave rotary_emb.inv_freq out, or keep one for all layers."""
    write_config(tmp_path)
    for file in ("tiktoken.model", "tokenizer_config.json"):
        shutil.copy(DIRECTORY / file, tmp_path)
    tensors = load_file(DIRECTORY / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith("inv_freq")}
    assert len(kept) < len(tensors)
    kept["language_model.model.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(kept, tmp_path / "model.safetensors")
    with torch.inference_mode():
        rows = [
            load_model(path, CPU, torch.float32).decoder.embed(torch.arange(processor().vocab_size))
            for path in (tmp_path, DIRECTORY)
        ]
    assert torch.equal(*rows)
