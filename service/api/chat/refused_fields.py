"""Fields of other servers' chat requests that are known and not supported: refused unless their value changes
nothing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

REFUSED: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "web_search_options": (),
    "plugins": ([],),
    "logits_processors": ([],),
    "samplers": (),
    "allowed_token_ids": (),
    "custom_token_bans": ("",),
    "bad_words": ([],),
    "best_of": (1,),
    "num_beams": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "echo": (False,),
    "prompt_logprobs": (False,),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "chat_template": (),
    "template": ("",),
    "documents": ([],),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "truncate_prompt_tokens": (),
    "thinking_token_budget": (),
    "include_reasoning": (True,),
    "separate_reasoning": (True,),
    "return_tokens_as_token_ids": (False,),
    "regex": (),
    "ebnf": (),
    "format": ("",),
    "guided_whitespace_pattern": (),
    "no_stop_trim": (False,),
    "lora_path": (),
    "moderation": (),
    "grammar": ("",),
    "grammar_string": ("",),
    "json_schema": (),
    "structural_tag": (),
    "typical_p": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "top_n_sigma": (0, -1),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "dynatemp_range": (0,),
    "dynamic_temperature": (False,),
    "smoothing_factor": (0,),
    "guidance_scale": (1,),
    "penalty_alpha": (0,),
    "repeat_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "do_sample": (True,),
    "watermark": (False,),
    "stop_regex": ([],),
    "stopping_strings": ([],),
    "stop_sequences": ([],),
    "ban_eos_token": (False,),
    "custom_logit_processor": (),
    "repetition_detection": (),
    "return_token_ids": (False,),
    "return_hidden_states": (False,),
    "return_tokens": (False,),
    "n_probs": (0,),
    "top_n_tokens": (0,),
    "add_special_tokens": (False,),
    "spaces_between_special_tokens": (True,),
    "prompt_embeds": (),
    "input_ids": (),
    "kv_transfer_params": (),
    "vllm_xargs": ({},),
    "adapter_id": (),
    "n_predict": (-1,),
    "num_predict": (-1,),
    "max_new_tokens": (),
    "max_output_tokens": (),
    "options": ({},),
    "sampling_params": ({},),
    "system": ("",),
    "images": ([],),
}
"""By the name of a field: the values that change nothing and are accepted."""

INSTEAD = {
    "ban_eos_token": "ignore_eos",
    "format": "response_format",
    "function_call": "tool_choice",
    "functions": "tools",
    "images": "content parts of the type image_url",
    "json_schema": "response_format.json_schema",
    **dict.fromkeys(("grammar", "grammar_string", "ebnf"), "structured_outputs.grammar"),
    **dict.fromkeys(("max_new_tokens", "max_output_tokens", "n_predict", "num_predict"), "max_completion_tokens"),
    **dict.fromkeys(("n_probs", "top_n_tokens"), "logprobs and top_logprobs"),
    **dict.fromkeys(("options", "sampling_params"), "its members as fields of the request"),
    "regex": "structured_outputs.regex",
    "repeat_penalty": "repetition_penalty",
    **dict.fromkeys(("stop_sequences", "stopping_strings"), "stop"),
    "system": "a message with role system",
}
"""What does the same here."""


def _described(neutral: tuple[Any, ...]) -> Any:
    harmless = "".join(f" ({json.dumps(value)})" for value in neutral)
    return Annotated[Any, Meta(description=f"not supported: refused unless the value changes nothing{harmless}")]


if TYPE_CHECKING:

    class RefusedFields(msgspec.Struct, frozen=True, kw_only=True):
        """A field for each name in REFUSED."""
else:
    RefusedFields = msgspec.defstruct(
        "RefusedFields",
        [(name, _described(neutral), None) for name, neutral in REFUSED.items()],
        frozen=True,
        kw_only=True,
    )
