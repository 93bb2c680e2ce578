"""A VoxCPM2 of a few hundred thousand untrained parameters, for tests that need many steps and no speech.

It speaks noise of moderate loudness and stops after a few seconds. Values are scaled uniform numbers, so the same bytes
come out on every machine.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from torch import Tensor

from benchmarks.checkpoints.codec_weights import Values, codec_tensors

EMBEDDED = Path(__file__).parents[2] / "models/embedded/voxcpm2"
"""A checkpoint with the published special tokens."""
ADDED_TOKENS = json.loads((EMBEDDED / "tokenizer.json").read_text("utf-8"))["added_tokens"]
SPECIAL = {token["id"]: token["content"] for token in ADDED_TOKENS}
SEED = 20
STOP_BIAS = 0.75
"""Against the stop head's random part, so that about one patch in twelve says stop."""

CONFIG: dict[str, Any] = json.loads(Path(__file__).with_name("miniature_voxcpm2.json").read_text())
MERGES = (
    "▁ t|h e|▁t he|i n|e r|a n|o n|r e|a t|e n|o r|▁ a|▁ s|▁ w|▁ o|i s|i t|o u|▁ c|▁ m|in g|▁o f|▁a n|▁an d|▁t o|"
    "e s|e d|▁ h|▁ b|a l|l l|▁ i|▁ p|▁ f|▁ d|▁ l|▁ n|▁ y|▁y ou|s t|c h|t h|s h|l y|i c|o w|e l|l o|v e|▁h el|▁hel lo|"
    "你 好|世 界|你好 世界"
)


def tokenizer() -> dict[str, Any]:
    """BPE with byte fallback: every UTF-8 text has ids."""
    merges = [(first, second) for first, second in (merge.split(" ") for merge in MERGES.split("|"))]
    han = sorted({character for merge in merges for character in "".join(merge) if character >= "一"})
    pieces = ["▁", *map(chr, range(0x21, 0x7F)), "。", "，", "？", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += [*han, *map("".join, merges)]
    free = (id_ for id_ in range(CONFIG["lm_config"]["vocab_size"]) if id_ not in SPECIAL)
    vocabulary = {text: id_ for id_, text in SPECIAL.items()} | dict(zip(pieces, free, strict=False))
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    spaces = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(spaces)
    made.add_tokens(
        [AddedToken(**{name: value for name, value in token.items() if name != "id"}) for token in ADDED_TOKENS]
    )
    return dict(json.loads(made.to_str()))


def network_tensors(values: Values) -> dict[str, Tensor]:
    """model.safetensors."""
    lm, encoder, dit = CONFIG["lm_config"], CONFIG["encoder_config"], CONFIG["dit_config"]
    width, feat, fsq = lm["hidden_size"], CONFIG["feat_dim"], CONFIG["scalar_quantization_latent_dim"]
    tensors: dict[str, Tensor] = {}

    def linear(name: str, out_features: int, in_width: int, *, bias: bool = True) -> None:
        tensors[f"{name}.weight"] = values.spread((out_features, in_width), in_width**-0.5)
        if bias:
            tensors[f"{name}.bias"] = values.spread((out_features,), 0.1)

    def stack(name: str, layers: int, hidden: int, inner: int, heads: int) -> None:
        queries, keys = heads * lm["kv_channels"], lm["num_key_value_heads"] * lm["kv_channels"]
        for layer in (f"{name}.layers.{index}" for index in range(layers)):
            tensors[f"{layer}.input_layernorm.weight"] = values.uniform((hidden,), 0.8, 1.2)
            tensors[f"{layer}.post_attention_layernorm.weight"] = values.uniform((hidden,), 0.8, 1.2)
            for kind, rows in (("q", queries), ("k", keys), ("v", keys)):
                linear(f"{layer}.self_attn.{kind}_proj", rows, hidden, bias=False)
            linear(f"{layer}.self_attn.o_proj", hidden, queries, bias=False)
            linear(f"{layer}.mlp.gate_proj", inner, hidden, bias=False)
            linear(f"{layer}.mlp.up_proj", inner, hidden, bias=False)
            linear(f"{layer}.mlp.down_proj", hidden, inner, bias=False)
        tensors[f"{name}.norm.weight"] = values.uniform((hidden,), 0.8, 1.2)

    inner, heads = lm["intermediate_size"], lm["num_attention_heads"]
    tensors["base_lm.embed_tokens.weight"] = values.spread((lm["vocab_size"], width), 1.0)
    stack("base_lm", lm["num_hidden_layers"], width, inner, heads)
    stack("residual_lm", CONFIG["residual_lm_num_layers"], width, inner, heads)
    for name, local in (("feat_encoder.encoder", encoder), ("feat_decoder.estimator.decoder", dit)):
        stack(name, local["num_layers"], local["hidden_dim"], local["ffn_dim"], local["num_heads"])
    local_width, dit_width = encoder["hidden_dim"], dit["hidden_dim"]
    tensors["feat_encoder.special_token"] = values.spread((1, 1, 1, local_width), 1.0)
    linear("feat_encoder.in_proj", local_width, feat)
    linear("feat_decoder.estimator.in_proj", dit_width, feat)
    linear("feat_decoder.estimator.cond_proj", dit_width, feat)
    linear("feat_decoder.estimator.out_proj", feat, dit_width)
    for name in ("time_mlp", "delta_time_mlp"):
        for layer in ("linear_1", "linear_2"):
            linear(f"feat_decoder.estimator.{name}.{layer}", dit_width, dit_width)
    linear("fsq_layer.in_proj", fsq, width)
    linear("fsq_layer.out_proj", width, fsq)
    linear("enc_to_lm_proj", width, local_width)
    linear("lm_to_dit_proj", dit_width, width)
    linear("res_to_dit_proj", dit_width, width)
    linear("fusion_concat_proj", width, 2 * width)
    linear("stop_proj", width, width)
    linear("stop_head", 2, width, bias=False)
    # The head has no bias: one unit that is always on takes its place.
    tensors["stop_proj.weight"][0] = 0.0
    tensors["stop_proj.bias"][0] = STOP_BIAS
    tensors["stop_head.weight"] *= 4.0
    tensors["stop_head.weight"][:, 0] = torch.tensor([0.5, -0.5])
    return {name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()}


def write(directory: Path) -> None:
    values = Values(SEED)
    network, codec = network_tensors(values), codec_tensors(values, CONFIG["audio_vae_config"])
    directory.mkdir(parents=True, exist_ok=True)
    save_file(network, directory / "model.safetensors")
    save_file(codec, directory / "audiovae.safetensors")
    for name, content in (("config.json", CONFIG), ("tokenizer.json", tokenizer())):
        text = json.dumps(content, ensure_ascii=False, indent=1)
        (directory / name).write_text(f"{text}\n", encoding="utf-8")
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        shutil.copyfile(EMBEDDED / name, directory / name)


@cache
def talker() -> Path:
    """The directory of its checkpoint, which lives as long as this process."""
    folder = Path(tempfile.mkdtemp(prefix="reprise-miniature-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    write(folder / "voxcpm2")
    return folder / "voxcpm2"
