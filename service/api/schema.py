"""The wire format of /v1/chat/completions and /v1/models, as OpenAI's clients use it. Unknown fields are ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from service.api.text import FinishReason, TokenLogprob
from service.engine.sampling_params import MAX_BIASES, MAX_LOGPROBS, MAX_STOP_IDS

# Requests


Fps = Annotated[float, Meta(gt=0)]
Frames = Annotated[int, Meta(ge=1)]
PixelBound = Annotated[Any, Meta(description="refused: detail bounds a picture, max_frames a video")]


class MediaUrl(msgspec.Struct, frozen=True):
    """url: data: or https:. detail: low is a small pixel budget. fps, max_frames: how a video is sampled."""

    url: str
    detail: Literal["auto", "low", "high", "original"] = "auto"
    fps: Fps | None = None
    max_frames: Frames | None = None
    min_pixels: PixelBound = None
    max_pixels: PixelBound = None
    total_pixels: PixelBound = None


class ContentPart(msgspec.Struct, frozen=True):
    """type: text, image_url or video_url; may be left out where one of these fields says it.

    fps, max_frames: of a video_url that does not say them itself.
    """

    type: str | None = None
    text: str | None = None
    image_url: MediaUrl | str | None = None
    video_url: MediaUrl | str | None = None
    fps: Fps | None = None
    max_frames: Frames | None = None
    min_pixels: PixelBound = None
    max_pixels: PixelBound = None
    total_pixels: PixelBound = None


PIXEL_BOUNDS = ("min_pixels", "max_pixels", "total_pixels")
"""Fields that other servers of these models take, in a part or in its URL object."""


class Message(msgspec.Struct, frozen=True):
    role: str
    content: str | list[ContentPart] | None = None
    tool_calls: Any = None
    function_call: Any = None


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False
    continuous_usage_stats: bool = False


Probability = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
LogitBias = Annotated[dict[TokenId, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=MAX_BIASES)]
Refused = Annotated[Any, Meta(description="not supported: refused unless it changes nothing")]


class ChatRequestBody(msgspec.Struct, frozen=True):
    """Fields of OpenAI's chat completion and the sampling fields that vLLM adds."""

    model: str
    messages: Annotated[list[Message], Meta(min_length=1)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Probability | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31 - 1)] | None = None
    min_p: Probability | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] | None = None
    logit_bias: LogitBias | None = None
    seed: Int64 | None = None
    stop: str | Annotated[list[str], Meta(max_length=4)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_IDS)] | None = None
    ignore_eos: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Known fields that are refused unless they are neutral: see REFUSED.
    response_format: Refused = None
    tools: Refused = None
    tool_choice: Refused = None
    functions: Refused = None
    function_call: Refused = None
    modalities: Refused = None
    audio: Refused = None
    web_search_options: Refused = None
    guided_json: Refused = None
    guided_regex: Refused = None
    guided_choice: Refused = None
    guided_grammar: Refused = None
    structured_outputs: Refused = None
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
    mm_processor_kwargs: Refused = None
    skip_special_tokens: Refused = None
    include_stop_str_in_output: Refused = None
    truncate_prompt_tokens: Refused = None
    media_io_kwargs: Refused = None
    enable_thinking: Refused = None
    thinking_token_budget: Refused = None
    include_reasoning: Refused = None
    separate_reasoning: Refused = None
    return_tokens_as_token_ids: Refused = None
    regex: Refused = None
    ebnf: Refused = None
    no_stop_trim: Refused = None
    lora_path: Refused = None
    moderation: Refused = None


REFUSED: dict[str, tuple[Any, ...]] = {
    "response_format": ({"type": "text"},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "structured_outputs": (),
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
    "mm_processor_kwargs": ({},),
    "skip_special_tokens": (True,),
    "include_stop_str_in_output": (False,),
    "truncate_prompt_tokens": (),
    "media_io_kwargs": ({},),
    "enable_thinking": (False,),
    "thinking_token_budget": (),
    "include_reasoning": (True,),
    "separate_reasoning": (True,),
    "return_tokens_as_token_ids": (False,),
    "regex": (),
    "ebnf": (),
    "no_stop_trim": (False,),
    "lora_path": (),
    "moderation": (),
}
"""Fields that would change the answer and are not honoured, with the values under which they change nothing."""

# Answers


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
    content: str
    role: Literal["assistant"] = "assistant"
    reasoning_content: str | UnsetType = UNSET
    refusal: None = None


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


class DeltaMessage(msgspec.Struct, frozen=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET


class ChunkChoice(msgspec.Struct, frozen=True):
    index: int
    delta: DeltaMessage
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None


class ChatCompletionChunk(msgspec.Struct, frozen=True):
    """usage: absent unless stream_options ask for it, then null in every chunk but the last."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    system_fingerprint: str | None = None


class ModelCard(msgspec.Struct, frozen=True):
    """root: what the operator named. notice: said of the untrained embedded default."""

    id: str
    created: int
    owned_by: str
    root: str
    max_model_len: int
    kind: Literal["chat", "speech"]
    object: Literal["model"] = "model"
    notice: str | UnsetType = UNSET


class ModelList(msgspec.Struct, frozen=True):
    data: list[ModelCard]
    object: Literal["list"] = "list"
