"""Fields of requests that are known and not supported: refused unless their value changes nothing. GET /docs lists
them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from service.api.http.errors import bad_request
from service.api.speech.schema import VoiceOptions


class Refused:
    """neutral: values that change nothing and are accepted. instead: what does the same here."""

    def __init__(self, *neutral: Any, instead: str = "") -> None:
        self.neutral = neutral
        self.instead = instead

    @property
    def description(self) -> str:
        harmless = "".join(f" ({json.dumps(value)})" for value in self.neutral)
        instead = f"; {self.instead}" if self.instead else ""
        return f"not supported: refused unless the value changes nothing{harmless}{instead}"


REFUSED = {
    "functions": Refused([], instead="use tools"),
    "function_call": Refused("none", "auto", instead="use tool_choice"),
    "web_search_options": Refused(),
    "plugins": Refused([]),
    "logits_processors": Refused([]),
    "samplers": Refused(),
    "allowed_token_ids": Refused(),
    "custom_token_bans": Refused(""),
    "bad_words": Refused([]),
    "best_of": Refused(1),
    "num_beams": Refused(1),
    "use_beam_search": Refused(False),
    "length_penalty": Refused(1),
    "echo": Refused(False),
    "prompt_logprobs": Refused(False),
    "continue_final_message": Refused(False),
    "add_generation_prompt": Refused(True),
    "chat_template": Refused(),
    "template": Refused(""),
    "documents": Refused([]),
    "skip_special_tokens": Refused(True),
    "include_stop_str_in_output": Refused(False),
    "truncate_prompt_tokens": Refused(),
    "thinking_token_budget": Refused(),
    "include_reasoning": Refused(True),
    "separate_reasoning": Refused(True),
    "return_tokens_as_token_ids": Refused(False),
    "regex": Refused(instead="use structured_outputs.regex"),
    "ebnf": Refused(instead="use structured_outputs.grammar"),
    "format": Refused("", instead="use response_format"),
    "guided_whitespace_pattern": Refused(),
    "no_stop_trim": Refused(False),
    "lora_path": Refused(),
    "moderation": Refused(),
    "grammar": Refused("", instead="use structured_outputs.grammar"),
    "grammar_string": Refused("", instead="use structured_outputs.grammar"),
    "json_schema": Refused(instead="use response_format.json_schema"),
    "structural_tag": Refused(),
    "typical_p": Refused(1),
    "tfs_z": Refused(1),
    "top_a": Refused(0),
    "top_n_sigma": Refused(0, -1),
    "epsilon_cutoff": Refused(0),
    "eta_cutoff": Refused(0),
    "xtc_probability": Refused(0),
    "dry_multiplier": Refused(0),
    "mirostat": Refused(0),
    "mirostat_mode": Refused(0),
    "dynatemp_range": Refused(0),
    "dynamic_temperature": Refused(False),
    "smoothing_factor": Refused(0),
    "guidance_scale": Refused(1),
    "penalty_alpha": Refused(0),
    "repeat_penalty": Refused(1, instead="use repetition_penalty"),
    "no_repeat_ngram_size": Refused(0),
    "do_sample": Refused(True),
    "watermark": Refused(False),
    "stop_regex": Refused([]),
    "stopping_strings": Refused([], instead="use stop"),
    "stop_sequences": Refused([], instead="use stop"),
    "ban_eos_token": Refused(False, instead="use ignore_eos"),
    "custom_logit_processor": Refused(),
    "repetition_detection": Refused(),
    "return_token_ids": Refused(False),
    "return_hidden_states": Refused(False),
    "return_tokens": Refused(False),
    "n_probs": Refused(0, instead="use logprobs and top_logprobs"),
    "top_n_tokens": Refused(0, instead="use logprobs and top_logprobs"),
    "add_special_tokens": Refused(False),
    "spaces_between_special_tokens": Refused(True),
    "prompt_embeds": Refused(),
    "input_ids": Refused(),
    "kv_transfer_params": Refused(),
    "vllm_xargs": Refused({}),
    "adapter_id": Refused(),
    "n_predict": Refused(-1, instead="use max_completion_tokens"),
    "num_predict": Refused(-1, instead="use max_completion_tokens"),
    "max_new_tokens": Refused(instead="use max_completion_tokens"),
    "max_output_tokens": Refused(instead="use max_completion_tokens"),
    "options": Refused({}, instead="use its members as fields of the request"),
    "sampling_params": Refused({}, instead="use its members as fields of the request"),
    "system": Refused("", instead="use a message with role system"),
    "images": Refused([], instead="use content parts of the type image_url"),
}
"""Fields of other servers' chat requests."""

_UPLOAD = "upload the voice (POST /v1/audio/voices) and name it as voice"
NOT_SPOKEN = {
    "ref_audio": Refused(instead=_UPLOAD),
    "ref_text": Refused(instead=_UPLOAD),
    "prompt_audio": Refused(),
    "prompt_text": Refused(),
    "min_len": Refused(),
    "max_new_tokens": Refused(instead="use max_len"),
    "split_granularity": Refused(),
    "timestamp_granularities": Refused(),
}
"""Fields of a speech request that a spoken answer cannot have."""


def refuse(given: msgspec.Struct, refused: Mapping[str, Refused], where: str, at: str = "") -> None:
    """Raise ApiError 400 for the first field that would change the output. at: what precedes its name in its path."""
    for name, one in refused.items():
        value = getattr(given, name)
        if value is not None and not any(_alike(value, harmless) for harmless in one.neutral):
            instead = f"; {one.instead}" if one.instead else ""
            message = f"{at}{name}: not supported {where}{instead}."
            raise bad_request(message, f"{at}{name}", "unsupported_parameter")


def _alike(value: Any, other: Any) -> bool:
    """Whether two values of JSON are the same: 0 is not false, though Python takes one for the other."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _fields(name: str, refused: Mapping[str, Refused], *bases: type[msgspec.Struct]) -> Any:
    described = [(field, Annotated[Any, Meta(description=one.description)], None) for field, one in refused.items()]
    return msgspec.defstruct(name, described, bases=bases, frozen=True, kw_only=True)


if TYPE_CHECKING:

    class RefusedFields(msgspec.Struct, frozen=True, kw_only=True):
        """A field for each name in REFUSED."""

    class UnspokenFields(VoiceOptions, frozen=True, kw_only=True):
        """Fields of speech that a spoken answer has, and one for each name in NOT_SPOKEN."""
else:
    RefusedFields = _fields("RefusedFields", REFUSED)
    UnspokenFields = _fields("UnspokenFields", NOT_SPOKEN, VoiceOptions)
