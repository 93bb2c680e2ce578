"""Request and response types of /v1/chat/completions and /v1/models, as in OpenAI's API. Unknown fields are ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from service.api.chat.detokenizer import FinishReason, TokenLogprob
from service.api.chat.spoken_schema import AnswerAudio, AudioParams, DeltaAudio, Modality, PastAudio
from service.api.chat.tool_schema import ToolCallDelta, ToolCallEntry, ToolChoice, ToolDefinition
from service.api.step_report import StepReport
from service.link.sampling_limits import MAX_BIASES, MAX_LOGPROBS, MAX_STOP_IDS, MIN_REPETITION_PENALTY

# Requests


Fps = Annotated[float, Meta(ge=1e-4)]
Frames = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Times = Annotated[list[Annotated[float, Meta(ge=0, le=1e8)]], Meta(min_length=1)]
PixelBound = Annotated[Any, Meta(description="not supported: use detail for pictures, fps and max_frames for videos")]


class MediaUrl(msgspec.Struct, frozen=True):
    """url: data: or https:. detail: "low" limits the pixels of a picture.

    fps, num_frames, max_frames: how a video is sampled. times: seconds of each frame of a list.
    """

    url: str
    detail: Literal["auto", "low", "high", "original"] | None = None
    fps: Fps | None = None
    num_frames: Frames | None = None
    max_frames: Frames | None = None
    times: Times | None = None
    min_pixels: PixelBound = None
    max_pixels: PixelBound = None
    total_pixels: PixelBound = None


class ContentPart(msgspec.Struct, frozen=True):
    """type: text, image_url, video_url, or refusal of an assistant; optional when one of these fields is set.

    fps, num_frames, max_frames, times: for a video_url that sets none of them itself.
    """

    type: str | None = None
    text: str | None = None
    refusal: str | None = None
    image_url: MediaUrl | str | None = None
    video_url: MediaUrl | str | None = None
    fps: Fps | None = None
    num_frames: Frames | None = None
    max_frames: Frames | None = None
    times: Times | None = None
    min_pixels: PixelBound = None
    max_pixels: PixelBound = None
    total_pixels: PixelBound = None


class VideoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sampling of all videos of a request that set none of these fields themselves."""

    fps: Fps | None = None
    num_frames: Frames | None = None
    max_frames: Frames | None = None


class MediaIoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    video: VideoOptions | None = None


PIXEL_BOUNDS = ("min_pixels", "max_pixels", "total_pixels")
"""Fields that other servers accept in a part or in its URL object."""


class Message(msgspec.Struct, frozen=True):
    """reasoning_content, refusal, tool_calls: of an assistant's message. tool_call_id: of a message with role tool,
    whose call it answers."""

    role: str
    content: str | list[ContentPart] | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCallEntry] | None = None
    tool_call_id: str | None = None
    function_call: Annotated[Any, Meta(description="not supported: use tool_calls")] = None
    audio: PastAudio | None = None


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(msgspec.Struct, frozen=True):
    """strict changes nothing: every answer fits the schema."""

    schema: dict[str, Any]
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """What the answer has to be: any text, a JSON object, or JSON that fits a schema. schema: refused; other servers
    take a schema there."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema: Any = None


Choices = Annotated[list[str], Meta(min_length=1)]


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's name for what an answer has to match; exactly one of these. json: a schema, as an object or as text."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None


Probability = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
LogitBias = Annotated[dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_BIASES)]
Refused = Annotated[Any, Meta(description="not supported: refused unless the value changes nothing")]


class ChatRequestBody(msgspec.Struct, frozen=True):
    """Fields of OpenAI's chat completions and the sampling fields that vLLM adds."""

    model: str
    messages: Annotated[list[Message], Meta(min_length=1)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Probability | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=MIN_REPETITION_PENALTY, le=10)] | None = None
    logit_bias: LogitBias | None = None
    seed: Int64 | None = None
    stop: str | Annotated[list[str], Meta(max_length=4)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_IDS)] | None = None
    ignore_eos: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    media_io_kwargs: MediaIoOptions | None = None
    mm_processor_kwargs: VideoOptions | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    modalities: Annotated[list[Modality], Meta(min_length=1)] | None = None
    audio: AudioParams | None = None
    # Known fields that are refused unless their value is neutral: see REFUSED.
    functions: Refused = None
    function_call: Refused = None
    web_search_options: Refused = None
    logits_processors: Refused = None
    allowed_token_ids: Refused = None
    bad_words: Refused = None
    best_of: Refused = None
    use_beam_search: Refused = None
    length_penalty: Refused = None
    echo: Refused = None
    prompt_logprobs: Refused = None
    continue_final_message: Refused = None
    add_generation_prompt: Refused = None
    chat_template: Refused = None
    documents: Refused = None
    skip_special_tokens: Refused = None
    include_stop_str_in_output: Refused = None
    truncate_prompt_tokens: Refused = None
    enable_thinking: Refused = None
    thinking_token_budget: Refused = None
    include_reasoning: Refused = None
    separate_reasoning: Refused = None
    return_tokens_as_token_ids: Refused = None
    regex: Refused = None
    ebnf: Refused = None
    guided_whitespace_pattern: Refused = None
    no_stop_trim: Refused = None
    lora_path: Refused = None
    moderation: Refused = None
    grammar: Refused = None
    json_schema: Refused = None
    structural_tag: Refused = None
    typical_p: Refused = None
    tfs_z: Refused = None
    top_a: Refused = None
    epsilon_cutoff: Refused = None
    eta_cutoff: Refused = None
    xtc_probability: Refused = None
    dry_multiplier: Refused = None
    mirostat: Refused = None
    mirostat_mode: Refused = None
    dynatemp_range: Refused = None
    smoothing_factor: Refused = None
    repeat_penalty: Refused = None
    no_repeat_ngram_size: Refused = None
    do_sample: Refused = None
    watermark: Refused = None
    stop_regex: Refused = None
    custom_logit_processor: Refused = None
    repetition_detection: Refused = None
    return_token_ids: Refused = None
    return_hidden_states: Refused = None
    return_tokens: Refused = None
    n_probs: Refused = None
    top_n_tokens: Refused = None
    add_special_tokens: Refused = None
    spaces_between_special_tokens: Refused = None
    prompt_embeds: Refused = None
    input_ids: Refused = None
    kv_transfer_params: Refused = None
    vllm_xargs: Refused = None
    adapter_id: Refused = None


REFUSED: dict[str, tuple[Any, ...]] = {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "web_search_options": (),
    "logits_processors": ([],),
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "echo": (False,),
    "prompt_logprobs": (False,),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "chat_template": (),
    "documents": ([],),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "truncate_prompt_tokens": (),
    "enable_thinking": (False,),
    "thinking_token_budget": (),
    "include_reasoning": (True,),
    "separate_reasoning": (True,),
    "return_tokens_as_token_ids": (False,),
    "regex": (),
    "ebnf": (),
    "guided_whitespace_pattern": (),
    "no_stop_trim": (False,),
    "lora_path": (),
    "moderation": (),
    "grammar": ("",),
    "json_schema": (),
    "structural_tag": (),
    "typical_p": (1,),
    "tfs_z": (1,),
    "top_a": (0,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "dynatemp_range": (0,),
    "smoothing_factor": (0,),
    "repeat_penalty": (1,),
    "no_repeat_ngram_size": (0,),
    "do_sample": (True,),
    "watermark": (False,),
    "stop_regex": ([],),
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
}
"""Unsupported fields, with the values that change nothing and are accepted."""

# Responses


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    text_tokens: int
    image_tokens: int
    video_tokens: int
    audio_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0
    audio_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()


class Logprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


class AnswerMessage(msgspec.Struct, frozen=True):
    """content: null in an answer of calls alone, and when the answer is spoken: audio then has the transcript."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallEntry] | UnsetType = UNSET
    refusal: None = None
    audio: AnswerAudio | UnsetType = UNSET


class Choice(msgspec.Struct, frozen=True):
    index: int
    message: AnswerMessage
    logprobs: Logprobs | None
    finish_reason: FinishReason


class ChatCompletion(msgspec.Struct, frozen=True):
    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage
    object: Literal["chat.completion"] = "chat.completion"
    system_fingerprint: str | None = None
    steps: StepReport | UnsetType = UNSET


class DeltaMessage(msgspec.Struct, frozen=True):
    """content: null in the first delta of an answer that is a call by the request's will."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    audio: DeltaAudio | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: DeltaMessage
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None


class ChatCompletionChunk(msgspec.Struct, frozen=True):
    """usage: absent unless stream_options.include_usage is set, then null in every chunk but the last, which has
    `steps`, too."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    system_fingerprint: str | None = None
    steps: StepReport | UnsetType = UNSET
