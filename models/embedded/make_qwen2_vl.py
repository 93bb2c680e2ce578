"""Makes models/embedded/qwen2_vl: a miniature Qwen2-VL in the published file format, untrained, from a fixed seed.

The same bytes come out every time:

    python -m models.embedded.make_qwen2_vl
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from models.byte_level import byte_alphabet

DIRECTORY = Path(__file__).parent / "qwen2_vl"
SEED = 20240916
NUM_MERGES = 240
VOCAB_SIZE = 512
WIDTH, INNER_WIDTH, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 128, 256, 4, 4, 2, 32
VISION_WIDTH, VISION_DEPTH, VISION_HEADS = 96, 3, 3
CONTEXT_LENGTH = 8192
MIN_PIXELS, MAX_PIXELS = 4 * 28 * 28, 256 * 28 * 28

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SAMPLE = """
 The picture shows a small red house beside a river , and behind the house there are three trees . In the first part of
 the video a person walks along the street with a dog ; in the second part they stop and look at the water . What is in
 this image ? Describe the scene in one sentence . There is a table with two cups , a plate and some fruit . The sign
 on the left says that the shop is open . How many people can you see , and what are they doing ? The man on the right
 is holding a blue bag , while the woman next to him is reading a newspaper . It looks like a sunny afternoon , because
 the light is warm and the shadows are long . The text in the photo is not clear , but the numbers are easy to read .
 You are a helpful assistant . Please answer the question about the chart : which color has the largest value , and by
 how much is it larger than the others ? The animals in the field are probably horses or cows . At the end of the clip
 the camera moves up to the sky and the screen becomes white .
"""
CHAT_TEMPLATE = (
    "{%- set count = namespace(image=0, video=0) -%}"
    "{%- for message in messages -%}"
    "{%- if loop.first and message['role'] != 'system' -%}"
    "{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' -}}"
    "{%- endif -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' -}}"
    "{%- if message['content'] is string -%}"
    "{{- message['content'] -}}"
    "{%- else -%}"
    "{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%}"
    "{%- set count.image = count.image + 1 -%}"
    "{%- if add_vision_id -%}{{- 'Picture ' ~ count.image ~ ': ' -}}{%- endif -%}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}"
    "{%- elif part['type'] == 'video' -%}"
    "{%- set count.video = count.video + 1 -%}"
    "{%- if add_vision_id -%}{{- 'Video ' ~ count.video ~ ': ' -}}{%- endif -%}"
    "{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}"
    "{%- else -%}"
    "{{- part['text'] -}}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- endif -%}"
    "{{- '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def learn_merges(text: str, count: int) -> list[tuple[str, str]]:
    """Byte-pair merges of the words of `text`, the most frequent pair first, ties in alphabetical order."""
    words = Counter(tuple(word.replace(" ", "Ġ")) for word in (f" {word}" for word in text.split()))
    merges: list[tuple[str, str]] = []
    for _ in range(count):
        pairs: Counter[tuple[str, str]] = Counter()
        for word, times in words.items():
            for pair in pairwise(word):
                pairs[pair] += times
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        words = Counter({_merge(word, best): times for word, times in words.items()})
    return merges


def _merge(word: Sequence[str], pair: tuple[str, str]) -> tuple[str, ...]:
    merged: list[str] = []
    for symbol in word:
        if merged and (merged[-1], symbol) == pair:
            merged[-1] += symbol
        else:
            merged.append(symbol)
    return tuple(merged)


def tokenizer() -> dict[str, Any]:
    merges = learn_merges(SAMPLE, NUM_MERGES)
    tokens = [*byte_alphabet(), *("".join(pair) for pair in merges)]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    added = [{"id": len(tokens) + i, "content": name, **flags} for i, name in enumerate(SPECIAL_TOKENS)]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": SPLIT_PATTERN}, "behavior": "Isolated", "invert": False},
                byte_level,
            ],
        },
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [list(pair) for pair in merges],
        },
    }


def config(ids: dict[str, int]) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
        "vision_end_token_id": ids["<|vision_end|>"],
        "vision_token_id": ids["<|vision_pad|>"],
        "image_token_id": ids["<|image_pad|>"],
        "video_token_id": ids["<|video_pad|>"],
        "hidden_act": "silu",
        "hidden_size": WIDTH,
        "intermediate_size": INNER_WIDTH,
        "max_position_embeddings": CONTEXT_LENGTH,
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vision_config": {
            "depth": VISION_DEPTH,
            "embed_dim": VISION_WIDTH,
            "hidden_size": WIDTH,
            "in_chans": 3,
            "mlp_ratio": 4,
            "num_heads": VISION_HEADS,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "temporal_patch_size": 2,
        },
        "vocab_size": VOCAB_SIZE,
    }


def weights() -> dict[str, Tensor]:
    """Matrices of variance 1 / fan_in and norms near 1, in the published names. Single bytes, special tokens and
    padding get small embeddings, so that answers are mostly syllables."""
    # RandomState's stream is frozen by NumPy's compatibility policy, and uniform numbers need no math library.
    random = np.random.RandomState(SEED)
    tensors: dict[str, Tensor] = {}

    def centred(*shape: int, deviation: float) -> Tensor:
        return torch.from_numpy((2 * random.random_sample(shape) - 1) * math.sqrt(3) * deviation)

    def matrix(name: str, *shape: int, bias: bool = False) -> None:
        tensors[f"{name}.weight"] = centred(*shape, deviation=1 / math.sqrt(math.prod(shape[1:])))
        if bias:
            tensors[f"{name}.bias"] = centred(shape[0], deviation=0.02)

    def norm(name: str, width: int, *, bias: bool = False) -> None:
        tensors[f"{name}.weight"] = 1 + centred(width, deviation=0.05)
        if bias:
            tensors[f"{name}.bias"] = centred(width, deviation=0.02)

    matrix("model.embed_tokens", VOCAB_SIZE, WIDTH)
    tensors["model.embed_tokens.weight"][:256] *= 0.25
    tensors["model.embed_tokens.weight"][256 + NUM_MERGES :] *= 0.25
    for layer in (f"model.layers.{i}" for i in range(LAYERS)):
        norm(f"{layer}.input_layernorm", WIDTH)
        matrix(f"{layer}.self_attn.q_proj", HEADS * HEAD_DIM, WIDTH, bias=True)
        matrix(f"{layer}.self_attn.k_proj", KV_HEADS * HEAD_DIM, WIDTH, bias=True)
        matrix(f"{layer}.self_attn.v_proj", KV_HEADS * HEAD_DIM, WIDTH, bias=True)
        matrix(f"{layer}.self_attn.o_proj", WIDTH, HEADS * HEAD_DIM)
        norm(f"{layer}.post_attention_layernorm", WIDTH)
        matrix(f"{layer}.mlp.gate_proj", INNER_WIDTH, WIDTH)
        matrix(f"{layer}.mlp.up_proj", INNER_WIDTH, WIDTH)
        matrix(f"{layer}.mlp.down_proj", WIDTH, INNER_WIDTH)
    norm("model.norm", WIDTH)
    matrix("visual.patch_embed.proj", VISION_WIDTH, 3, 2, 14, 14)
    for block in (f"visual.blocks.{i}" for i in range(VISION_DEPTH)):
        norm(f"{block}.norm1", VISION_WIDTH, bias=True)
        matrix(f"{block}.attn.qkv", 3 * VISION_WIDTH, VISION_WIDTH, bias=True)
        matrix(f"{block}.attn.proj", VISION_WIDTH, VISION_WIDTH, bias=True)
        norm(f"{block}.norm2", VISION_WIDTH, bias=True)
        matrix(f"{block}.mlp.fc1", 4 * VISION_WIDTH, VISION_WIDTH, bias=True)
        matrix(f"{block}.mlp.fc2", VISION_WIDTH, 4 * VISION_WIDTH, bias=True)
    norm("visual.merger.ln_q", VISION_WIDTH, bias=True)
    matrix("visual.merger.mlp.0", 4 * VISION_WIDTH, 4 * VISION_WIDTH, bias=True)
    matrix("visual.merger.mlp.2", WIDTH, 4 * VISION_WIDTH, bias=True)
    return {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in tensors.items()}


def make(directory: Path) -> None:
    """Writes all files of the checkpoint into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    published = tokenizer()
    ids = {token["content"]: token["id"] for token in published["added_tokens"]}
    files: dict[str, dict[str, Any]] = {
        "config.json": config(ids),
        "generation_config.json": {
            "bos_token_id": ids["<|endoftext|>"],
            "do_sample": True,
            "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
            "pad_token_id": ids["<|endoftext|>"],
            "repetition_penalty": 1.0,
            "temperature": 0.01,
            "top_k": 1,
            "top_p": 0.001,
        },
        "preprocessor_config.json": {
            "image_mean": [0.48145466, 0.4578275, 0.40821073],
            "image_processor_type": "Qwen2VLImageProcessor",
            "image_std": [0.26862954, 0.26130258, 0.27577711],
            "max_pixels": MAX_PIXELS,
            "merge_size": 2,
            "min_pixels": MIN_PIXELS,
            "patch_size": 14,
            "processor_class": "Qwen2VLProcessor",
            "temporal_patch_size": 2,
        },
        "tokenizer.json": published,
        "tokenizer_config.json": {
            "chat_template": CHAT_TEMPLATE,
            "eos_token": "<|im_end|>",
            "model_max_length": CONTEXT_LENGTH,
            "pad_token": "<|endoftext|>",
            "tokenizer_class": "Qwen2Tokenizer",
        },
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    save_file(weights(), directory / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    make(Path(sys.argv[1]) if len(sys.argv) > 1 else DIRECTORY)
