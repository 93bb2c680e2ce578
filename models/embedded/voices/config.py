"""config.json and the tokenizer of the embedded voice."""

from __future__ import annotations

from typing import Any

from models.embedded.voices.latents import FRAMES, LATENT_DIM

SPECIAL = {
    0: "<unk>",
    1: "<s>",
    2: "</s>",
    101: "<|audio_start|>",
    102: "<|audio_end|>",
    103: "<|audio_prompt_start|>",
    104: "<|audio_prompt_end|>",
}
CHARACTERS = "▁abcdefghijklmnopqrstuvwxyz0123456789.,?!'-:;$%&@#/+=*()\""
"""Tokens, from id 3 on. Capitals are made small, and what is not here is <unk>."""
UNKNOWN = 0
AUDIO_START, REFERENCE_START, REFERENCE_END = 101, 103, 104
IDS = {character: index for index, character in enumerate(CHARACTERS, start=3)}


def tokens(text: str) -> list[int]:
    """What tokenizer.json makes of a text without doubled blanks: one id a character."""
    return [IDS.get(character, UNKNOWN) for character in text.lower().replace(" ", "▁")]


CONFIG: dict[str, Any] = {
    "architecture": "voxcpm2",
    "lm_config": {
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_size": 256,
        "intermediate_size": 640,
        "max_position_embeddings": 1024,
        "num_attention_heads": 8,
        "num_hidden_layers": 5,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000,
        "kv_channels": 32,
        "rope_scaling": {
            "type": "longrope",
            "long_factor": [1.0] * 16,
            "short_factor": [1.0] * 16,
            "original_max_position_embeddings": 1024,
        },
        "vocab_size": 112,
        "use_mup": False,
        "scale_emb": 12,
        "dim_model_base": 256,
        "scale_depth": 1.4,
    },
    "patch_size": FRAMES,
    "feat_dim": LATENT_DIM,
    "scalar_quantization_latent_dim": 128,
    "scalar_quantization_scale": 9,
    "residual_lm_num_layers": 1,
    "residual_lm_no_rope": True,
    "encoder_config": {"hidden_dim": 128, "ffn_dim": 256, "num_heads": 4, "num_layers": 1, "kv_channels": 32},
    "dit_config": {
        "hidden_dim": 192,
        "ffn_dim": 512,
        "num_heads": 8,
        "num_layers": 4,
        "kv_channels": 32,
        "mean_mode": False,
        "cfm_config": {"sigma_min": 1e-6, "solver": "euler", "t_scheduler": "log-norm", "inference_cfg_rate": 2.0},
    },
    "audio_vae_config": {
        "encoder_dim": 8,
        "encoder_rates": [2, 5, 8, 8],
        "latent_dim": LATENT_DIM,
        "decoder_dim": 384,
        "decoder_rates": [10, 8, 8, 3],
        "sr_bin_boundaries": [20000, 30000, 40000],
        "sample_rate": 16000,
        "out_sample_rate": 48000,
    },
    "max_length": 1024,
    "device": "cuda",
    "dtype": "bfloat16",
}
"""Names are those of the published file, so that it is one."""
