"""Weights of the training network as a checkpoint in the published layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from models.embedded.vision_training.network import MEAN, STD, Shape
from models.embedded.world import vocabulary
from models.embedded.world.pictures import MAX_PIXELS, MIN_PIXELS

CONTEXT_LENGTH = 8192
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


def publish(directory: Path, shape: Shape, tensors: Mapping[str, Tensor]) -> None:
    """Writes all files of the checkpoint; tensors in any float type are stored as bf16, auxiliary ones are left out."""
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = vocabulary.tokenizer()
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    files: dict[str, dict[str, Any]] = {
        "config.json": config(shape, ids),
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
            "image_mean": list(MEAN),
            "image_processor_type": "Qwen2VLImageProcessor",
            "image_std": list(STD),
            "max_pixels": MAX_PIXELS,
            "merge_size": 2,
            "min_pixels": MIN_PIXELS,
            "patch_size": 14,
            "processor_class": "Qwen2VLProcessor",
            "temporal_patch_size": 2,
        },
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {
            "chat_template": CHAT_TEMPLATE,
            "eos_token": "<|im_end|>",
            "model_max_length": CONTEXT_LENGTH,
            "pad_token": "<|endoftext|>",
            "tokenizer_class": "PreTrainedTokenizerFast",  # as it is written: Qwen2Tokenizer would not know its words,
        },
    }
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    kept = {
        name: tensor.detach().to(torch.bfloat16).cpu().contiguous()
        for name, tensor in sorted(tensors.items())
        if not name.startswith("auxiliary.")
    }
    save_file(kept, directory / "model.safetensors", metadata={"format": "pt"})


def config(shape: Shape, ids: Mapping[str, int]) -> dict[str, Any]:
    """config.json with the flat names of the published file. rope_theta is small: a head of 32 values has few
    frequencies, and the published million would leave the columns of a picture alike."""
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
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": CONTEXT_LENGTH,
        "num_attention_heads": shape.heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {"type": "mrope", "mrope_section": list(shape.mrope_section)},
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_sliding_window": False,
        "vision_config": {
            "depth": shape.vision_depth,
            "embed_dim": shape.vision_hidden_size,
            "hidden_size": shape.hidden_size,
            "in_chans": 3,
            "mlp_ratio": 4,
            "num_heads": shape.vision_heads,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "spatial_patch_size": 14,
            "temporal_patch_size": 2,
        },
        "vocab_size": shape.vocab_size,
    }
