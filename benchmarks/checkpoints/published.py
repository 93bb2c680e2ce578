"""Directories with the published sizes of each model and a miniature tokenizer, to be loaded with random weights.

The files come from the golden miniatures in tests/golden; only sizes in config.json and preprocessor_config.json are
replaced. Special token ids stay those of the miniature tokenizer.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from benchmarks.checkpoints.quantised import set_form

GOLDEN = Path(__file__).parents[2] / "tests/golden"

_QWEN_VISION = {"depth": 32, "embed_dim": 1280, "num_heads": 16, "mlp_ratio": 4}
_QWEN_TEXT = {
    "num_hidden_layers": 28,
    "max_position_embeddings": 32768,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
}
_QWEN_2_5_TEXT = {"max_position_embeddings": 128000, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}
_QWEN_2_5_VISION = {
    "depth": 32,
    "hidden_size": 1280,
    "num_heads": 16,
    "intermediate_size": 3420,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
_QWEN_PIXELS = {"min_pixels": 3136, "max_pixels": 12845056}
_SIGLIP = {
    "hidden_size": 1152,
    "image_size": 980,
    "intermediate_size": 4304,
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
}
_LOCAL = {"hidden_dim": 1024, "ffn_dim": 4096, "num_heads": 16, "num_layers": 12, "kv_channels": 128}

_QWEN3_LARGE_VISION = {"depth": 27, "hidden_size": 1152, "intermediate_size": 4304, "num_heads": 16}
_QWEN3_SMALL_VISION = {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "num_heads": 16}
_QWEN3_PIXELS = {"size": {"shortest_edge": 65536, "longest_edge": 16777216}}
_QWEN3_VIDEO_PIXELS = {"size": {"shortest_edge": 4096, "longest_edge": 25165824}}


def _qwen3_vl(
    width: int, inner: int, layers: int, heads: tuple[int, int], *, tied: bool = False, **experts: int
) -> dict[str, Any]:
    """config.json of a published size. The tower is the small one where the head is tied."""
    vision: dict[str, Any]
    vision, levels = (_QWEN3_SMALL_VISION, [5, 11, 17]) if tied else (_QWEN3_LARGE_VISION, [8, 16, 24])
    text = {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "head_dim": 128,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "vocab_size": 151936,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": tied,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        **experts,
    }
    vision = vision | {"deepstack_visual_indexes": levels, "out_hidden_size": width, "num_position_embeddings": 2304}
    return {"text_config": text, "vision_config": vision, "tie_word_embeddings": tied}


_QWEN3_TINY_VISION = {"depth": 12, "hidden_size": 768, "intermediate_size": 3072, "num_heads": 12}


def _qwen3_5(
    width: int,
    inner: int,
    layers: int,
    heads: tuple[int, int],
    value_heads: int,
    vision: dict[str, int] = _QWEN3_LARGE_VISION,
    **experts: int,
) -> dict[str, Any]:
    """config.json of a published size. Towers other than the large one come with a tied head."""
    tied = vision is not _QWEN3_LARGE_VISION
    text = {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "head_dim": 256,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "linear_num_key_heads": 16,
        "linear_num_value_heads": value_heads,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "layer_types": None,
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "tie_word_embeddings": tied,
        "rope_parameters": {"mrope_section": [11, 11, 10]},
        **experts,
    }
    whole = vision | {"out_hidden_size": width, "num_position_embeddings": 2304}
    return {"text_config": text, "vision_config": whole, "tie_word_embeddings": tied}


def _qwen3_asr(width: int, inner: int, tower: tuple[int, int, int], vocab_size: int = 151936) -> dict[str, Any]:
    """text_config and audio_config of a published size. tower: width, layers and heads."""
    text = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": 28, "vocab_size": vocab_size}
    text |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    audio = {"d_model": tower[0], "encoder_layers": tower[1], "encoder_attention_heads": tower[2]}
    audio |= {"encoder_ffn_dim": 4 * tower[0], "downsample_hidden_size": 480, "n_window_infer": 800}
    return {"text_config": text, "audio_config": audio | {"output_dim": width}}


SIZES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl_2b": (
        "qwen2_vl",
        _QWEN_TEXT
        | {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12, "num_key_value_heads": 2}
        | {"vocab_size": 151936, "tie_word_embeddings": True}
        | {"vision_config": _QWEN_VISION | {"hidden_size": 1536}},
        _QWEN_PIXELS,
    ),
    "qwen2_vl_7b": (
        "qwen2_vl",
        _QWEN_TEXT
        | {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4}
        | {"vocab_size": 152064, "tie_word_embeddings": False}
        | {"vision_config": _QWEN_VISION | {"hidden_size": 3584}},
        _QWEN_PIXELS,
    ),
    "qwen3_vl_2b": ("qwen3_vl", _qwen3_vl(2048, 6144, 28, (16, 8), tied=True), _QWEN3_PIXELS),
    "qwen3_vl_4b": ("qwen3_vl", _qwen3_vl(2560, 9728, 36, (32, 8), tied=True), _QWEN3_PIXELS),
    "qwen3_vl_8b": ("qwen3_vl", _qwen3_vl(4096, 12288, 36, (32, 8)), _QWEN3_PIXELS),
    "qwen3_vl_30b_a3b": (
        "qwen3_vl_moe",
        _qwen3_vl(2048, 6144, 48, (32, 4), num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768),
        _QWEN3_PIXELS,
    ),
    "qwen3_5_0_8b": ("qwen3_5", _qwen3_5(1024, 3584, 24, (8, 2), 16, _QWEN3_TINY_VISION), _QWEN3_PIXELS),
    "qwen3_5_2b": ("qwen3_5", _qwen3_5(2048, 6144, 24, (8, 2), 16, _QWEN3_SMALL_VISION), _QWEN3_PIXELS),
    "qwen3_5_4b": ("qwen3_5", _qwen3_5(2560, 9216, 32, (16, 4), 32, _QWEN3_SMALL_VISION), _QWEN3_PIXELS),
    "qwen3_5_9b": ("qwen3_5", _qwen3_5(4096, 12288, 32, (16, 4), 32), _QWEN3_PIXELS),
    "qwen3_5_27b": ("qwen3_5", _qwen3_5(5120, 17408, 64, (24, 4), 48), _QWEN3_PIXELS),
    "qwen3_5_35b_a3b": (
        "qwen3_5_moe",
        _qwen3_5(
            *(2048, 512, 40, (16, 2), 32),
            num_experts=256,
            num_experts_per_tok=8,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
        ),
        _QWEN3_PIXELS,
    ),
    "qwen2_5_vl_3b": (
        "qwen2_5_vl",
        _QWEN_2_5_TEXT
        | {"hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36}
        | {"num_attention_heads": 16, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True}
        | {"vision_config": _QWEN_2_5_VISION | {"out_hidden_size": 2048}},
        _QWEN_PIXELS,
    ),
    "qwen2_5_vl_7b": (
        "qwen2_5_vl",
        _QWEN_2_5_TEXT
        | {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
        | {"num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False}
        | {"vision_config": _QWEN_2_5_VISION | {"out_hidden_size": 3584}},
        _QWEN_PIXELS,
    ),
    "minicpmv_4_5": (
        "minicpmv_4_5",
        {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32}
        | {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151748, "max_position_embeddings": 40960}
        | {"query_num": 64, "slice_config": {"scale_resolution": 448}, "vision_config": _SIGLIP},
        {"scale_resolution": 448, "image_feature_size": 64},
    ),
    "minicpmv_4_6": (
        "minicpmv_4_6",
        {
            "text_config": _qwen3_5(1024, 3584, 24, (8, 2), 16)["text_config"] | {"vocab_size": 248094},
            "vision_config": _SIGLIP,
            "insert_layer_id": 6,
            "tie_word_embeddings": True,
        },
        {"scale_resolution": 448},
    ),
    "kimi_vl_a3b": (
        "kimi_vl",
        {
            "vision_config": {"num_attention_heads": 16, "num_hidden_layers": 27, "hidden_size": 1152}
            | {"intermediate_size": 4304, "init_pos_emb_height": 64, "init_pos_emb_width": 64},
            "text_config": {"vocab_size": 163840, "hidden_size": 2048, "num_hidden_layers": 27}
            | {"num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 11264}
            | {"moe_intermediate_size": 1408, "n_routed_experts": 64, "num_experts_per_tok": 6, "kv_lora_rank": 512}
            | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "max_position_embeddings": 131072},
            "vocab_size": 163840,
        },
        {"in_token_limit": 4096},
    ),
    "qwen3_asr_0_6b": ("qwen3_asr", {"thinker_config": _qwen3_asr(1024, 3072, (896, 18, 14))}, {}),
    "qwen3_asr_1_7b": ("qwen3_asr", {"thinker_config": _qwen3_asr(2048, 6144, (1024, 24, 16))}, {}),
    "qwen3_aligner_0_6b": (
        "qwen3_asr_aligner",
        _qwen3_asr(1024, 3072, (1024, 24, 16), 152064)
        | {"id2label": {str(index): f"LABEL_{index}" for index in range(5000)}},
        {},
    ),
    "voxcpm2": (
        "voxcpm2",
        {
            "lm_config": {"hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 32768}
            | {"num_attention_heads": 16, "num_hidden_layers": 28, "num_key_value_heads": 2, "kv_channels": 128}
            | {"vocab_size": 73448}
            | {
                "rope_scaling": {
                    # The values do not change the cost of a step; those of the published file are close to these.
                    "short_factor": [1.0 + 0.475 * i for i in range(64)],
                    "long_factor": [1.0 + 0.475 * i for i in range(64)],
                    "original_max_position_embeddings": 32768,
                }
            },
            "feat_dim": 64,
            "scalar_quantization_latent_dim": 512,
            "residual_lm_num_layers": 8,
            "encoder_config": _LOCAL,
            "dit_config": _LOCAL,
            "audio_vae_config": {"encoder_dim": 128, "latent_dim": 64, "decoder_dim": 2048},
            "max_length": 8192,
        },
        {},
    ),
}


def make(name: str, parent: Path, form: str | None = None) -> Path:
    """Write the directory `parent`/`name`; existing files are replaced. form: of benchmarks.checkpoints.quantised."""
    if form is not None:
        directory = make(name, parent / form)
        set_form(directory, form)
        return directory
    source, config, preprocessor = SIZES[name]
    target = parent / name
    target.mkdir(parents=True, exist_ok=True)
    for path in (GOLDEN / source).iterdir():
        if path.is_file() and path.suffix in (".json", ".model", ".txt") and path.name != "inputs.json":
            shutil.copy(path, target / path.name)
    _override(target / "config.json", config)
    if (target / "processor_config.json").exists():
        both = ("image_processor", "video_processor")
        _override(target / "processor_config.json", dict.fromkeys(both, preprocessor))
    elif preprocessor:
        _override(target / "preprocessor_config.json", preprocessor)
    if (target / "video_preprocessor_config.json").exists():
        _override(target / "video_preprocessor_config.json", _QWEN3_VIDEO_PIXELS)
    return target


def _override(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(_merged(json.loads(path.read_text()), values), indent=2))


def _merged(base: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in values.items():
        deeper = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = _merged(base[key], value) if deeper else value
    return merged
