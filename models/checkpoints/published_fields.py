"""What the fields of a published checkpoint's JSON files may hold. The tables hold for all families, since a field
means the same wherever it occurs. Fields that are not listed are not read, or are checked where they are read."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.interfaces.errors import CheckpointError

_MAX_SHOWN = 60
"""Characters of a value that an error message shows."""


@dataclass(frozen=True)
class Kind:
    """A kind of value that a field may hold."""

    expected: str
    """The kind in words, for "x is null, expected ..."."""
    fits: Callable[[Any], bool]
    """Whether a value is of this kind."""


def check_fields(directory: Path, name: str, values: Mapping[str, Any]) -> None:
    """Raises CheckpointError for the first field of file `name` whose value is of the wrong kind, with its place and
    what it should hold. Files that have no table are not checked."""
    _check(f"{directory}: {name}: ", values, _FILES.get(name, {}))


def _check(place: str, values: Mapping[str, Any], kinds: Mapping[str, Kind]) -> None:
    for name, value in values.items():
        kind = kinds.get(name)
        if kind is None:
            continue
        if type(value) is int and value.bit_length() > 63:
            raise CheckpointError(f"{place}{name} is {_shown(value)}, expected a number below 2^63")
        if not kind.fits(value):
            raise CheckpointError(f"{place}{name} is {_shown(value)}, expected {kind.expected}")
        if isinstance(value, dict):
            _check(f"{place}{name}.", value, kinds)


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _or_null(kind: Kind) -> Kind:
    return Kind(kind.expected, lambda value: value is None or kind.fits(value))


def _list_of(kind: Kind, plural: str) -> Kind:
    return Kind(f"a list of {plural}", lambda value: isinstance(value, list) and all(map(kind.fits, value)))


_OBJECT = Kind("an object", lambda value: isinstance(value, dict))
_TEXT = Kind("a string", lambda value: isinstance(value, str))
_SWITCH = Kind("true or false", lambda value: isinstance(value, bool))
_COUNT = Kind("a positive integer", lambda value: type(value) is int and value > 0)
_INDEX = Kind("an integer of at least 0", lambda value: type(value) is int and value >= 0)
_INTEGER = Kind("an integer", lambda value: type(value) is int)
_NUMBER = Kind("a number", _is_number)
_POSITIVE = Kind("a positive number", lambda value: _is_number(value) and value > 0)
_AT_LEAST_0 = Kind("a number of at least 0", lambda value: _is_number(value) and value >= 0)
_SHARE = Kind("a number from 0 to 1", lambda value: _is_number(value) and 0 <= value <= 1)
_INDICES = _list_of(_INDEX, "integers of at least 0")
_COUNTS = Kind("a list of positive integers, at least one", lambda v: v != [] and _list_of(_COUNT, "").fits(v))
_NUMBERS, _POSITIVES = _list_of(_NUMBER, "numbers"), _list_of(_POSITIVE, "positive numbers")
_IDS = Kind("a token id or a list of them", lambda ids: ids is None or _INDEX.fits(ids) or _INDICES.fits(ids))


def _fields(kind: Kind, names: str) -> dict[str, Kind]:
    return dict.fromkeys(names.split(), kind)


# null is allowed where the code treats it as a missing field, or has an error message of its own for one.
_CONFIG = {
    **_fields(_or_null(_list_of(_TEXT, "strings")), "architectures"),
    **_fields(_or_null(_TEXT), "architecture model_type"),
    **_fields(_or_null(_OBJECT), "text_config vision_config rope_scaling rope_parameters slice_config"),
    **_fields(_OBJECT, "lm_config encoder_config dit_config audio_vae_config"),
    # All families: sizes of the language model and of the tower.
    **_fields(_COUNT, "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads"),
    **_fields(_COUNT, "max_position_embeddings original_max_position_embeddings patch_size"),
    **_fields(_or_null(_COUNT), "num_key_value_heads head_dim"),
    **_fields(_POSITIVE, "rms_norm_eps layer_norm_eps"),
    **_fields(_or_null(_POSITIVE), "rope_theta factor beta_fast beta_slow attention_factor"),
    **_fields(_POSITIVES, "short_factor long_factor"),
    **_fields(_or_null(_SWITCH), "tie_word_embeddings attention_bias use_sliding_window norm_topk_prob truncate"),
    **_fields(_IDS, "eos_token_id"),
    # Qwen2-VL, Qwen2.5-VL and Qwen3-VL.
    **_fields(_COUNT, "depth embed_dim num_heads out_hidden_size in_channels in_chans"),
    **_fields(_COUNT, "temporal_patch_size spatial_merge_size window_size num_position_embeddings"),
    **_fields(_POSITIVE, "mlp_ratio tokens_per_second"),
    **_fields(_INDICES, "mrope_section deepstack_visual_indexes fullatt_block_indexes"),
    **_fields(_or_null(_SWITCH), "mrope_interleaved"),
    # transformers 4.52 to 4.57 writes null for some of these into text_config, where nobody reads them.
    **_fields(_or_null(_INDEX), "image_token_id video_token_id vision_start_token_id vision_end_token_id"),
    # Experts.
    **_fields(_or_null(_COUNT), "num_experts num_local_experts"),
    **_fields(_COUNT, "num_experts_per_tok moe_intermediate_size n_routed_experts n_shared_experts"),
    **_fields(_or_null(_INDEX), "decoder_sparse_step"),
    **_fields(_or_null(_INDICES), "mlp_only_layers"),
    **_fields(_COUNT, "shared_expert_intermediate_size"),
    **_fields(_INDEX, "first_k_dense_replace"),
    **_fields(_POSITIVE, "routed_scaling_factor"),
    # Qwen3.5.
    **_fields(_or_null(_list_of(_TEXT, "strings")), "layer_types"),
    **_fields(_or_null(_COUNT), "full_attention_interval"),
    **_fields(_or_null(_SHARE), "partial_rotary_factor"),
    **_fields(_COUNT, "linear_num_key_heads linear_num_value_heads linear_key_head_dim linear_value_head_dim"),
    **_fields(_COUNT, "linear_conv_kernel_dim"),
    # MiniCPM-V.
    **_fields(_COUNT, "query_num image_size"),
    **_fields(_or_null(_COUNT), "max_slice_nums scale_resolution"),
    **_fields(_or_null(_SWITCH), "slice_mode use_image_id"),
    **_fields(_or_null(_INDEX), "insert_layer_id"),
    **_fields(_or_null(_TEXT), "downsample_mode"),
    # Kimi-VL.
    **_fields(_COUNT, "kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim"),
    **_fields(_COUNT, "init_pos_emb_height init_pos_emb_width"),
    **_fields(_COUNTS, "merge_kernel_size"),
    **_fields(_INDEX, "media_placeholder_token_id"),
    # Qwen3-ASR.
    **_fields(_OBJECT, "thinker_config audio_config"),
    **_fields(_or_null(_OBJECT), "id2label"),
    **_fields(_COUNT, "d_model encoder_layers encoder_ffn_dim downsample_hidden_size output_dim n_window_infer"),
    **_fields(_or_null(_COUNT), "encoder_attention_heads classify_num timestamp_segment_time"),
    **_fields(_or_null(_INDEX), "audio_token_id timestamp_token_id"),
    **_fields(_list_of(_TEXT, "strings"), "support_languages"),
    # VoxCPM2.
    **_fields(_COUNT, "feat_dim scalar_quantization_latent_dim scalar_quantization_scale residual_lm_num_layers"),
    **_fields(_COUNT, "max_length hidden_dim ffn_dim num_layers kv_channels"),
    **_fields(_COUNT, "encoder_dim latent_dim decoder_dim sample_rate out_sample_rate"),
    **_fields(_COUNTS, "encoder_rates decoder_rates sr_bin_boundaries"),
}

_PREPROCESSOR = {
    **_fields(_or_null(_OBJECT), "size"),
    **_fields(_or_null(_COUNT), "shortest_edge longest_edge min_pixels max_pixels"),
    **_fields(_COUNT, "in_token_limit"),
    **_fields(_or_null(_COUNT), "patch_size temporal_patch_size merge_size image_feature_size"),
    **_fields(_or_null(_COUNT), "max_slice_nums scale_resolution"),
    **_fields(_or_null(_SWITCH), "slice_mode use_image_id"),
    **_fields(_or_null(_TEXT), "downsample_mode"),
    **_fields(_or_null(_POSITIVE), "fps"),
    **_fields(_or_null(_COUNT), "min_frames max_frames num_frames max_num_frames"),
    **_fields(_or_null(_SWITCH), "cap_pixels_per_frame"),
    **_fields(_or_null(_NUMBERS), "image_mean norm_mean"),
    **_fields(_or_null(_POSITIVES), "image_std norm_std"),
}

_FILES: dict[str, dict[str, Kind]] = {
    "config.json": _CONFIG,
    "preprocessor_config.json": _PREPROCESSOR,
    "video_preprocessor_config.json": _PREPROCESSOR,
    "processor_config.json": {
        **_PREPROCESSOR,
        **_fields(_or_null(_OBJECT), "image_processor video_processor feature_extractor"),
        **_fields(_COUNT, "timestamp_segment_time"),
    },
    "generation_config.json": {
        **_fields(_IDS, "eos_token_id"),
        **_fields(_or_null(_SWITCH), "do_sample"),
        **_fields(_or_null(_AT_LEAST_0), "temperature"),
        **_fields(_or_null(_SHARE), "top_p min_p"),
        **_fields(_or_null(_INTEGER), "top_k"),
        **_fields(_or_null(_POSITIVE), "repetition_penalty"),
    },
}
