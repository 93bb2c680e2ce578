"""Request and response types of /v1/chat/completions and /v1/models, as in OpenAI's API. Unknown fields are ignored."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from service.api.engines.request_stream import StepReport
from service.api.http.errors import invalid
from service.api.speech.schema import SampleRate, VoiceOptions
from service.link.sampling import MAX_BIAS, MAX_BIASES, MAX_LOGPROBS, MAX_STOP_IDS, SamplingOptions
from service.media.audio_formats import ChatFormat


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


def _refused(names: str, *neutral: Any, instead: str = "") -> dict[str, Refused]:
    return dict.fromkeys(names.split(), Refused(*neutral, instead=instead))


REFUSED = {
    **_refused("web_search_options samplers allowed_token_ids chat_template truncate_prompt_tokens structural_tag"),
    **_refused(
        "thinking_token_budget guided_whitespace_pattern lora_path adapter_id moderation prompt_embeds input_ids"
    ),
    **_refused("custom_logit_processor repetition_detection kv_transfer_params"),
    **_refused("plugins logits_processors bad_words documents stop_regex", []),
    **_refused("custom_token_bans template", ""),
    **_refused("vllm_xargs", {}),
    **_refused("best_of num_beams length_penalty typical_p tfs_z guidance_scale", 1),
    **_refused("use_beam_search echo prompt_logprobs continue_final_message include_stop_str_in_output", False),
    **_refused("return_tokens_as_token_ids no_stop_trim dynamic_temperature watermark return_token_ids", False),
    **_refused("return_hidden_states return_tokens add_special_tokens", False),
    **_refused("add_generation_prompt skip_special_tokens include_reasoning separate_reasoning do_sample", True),
    **_refused("spaces_between_special_tokens", True),
    **_refused("top_a epsilon_cutoff eta_cutoff xtc_probability dry_multiplier mirostat mirostat_mode", 0),
    **_refused("dynatemp_range smoothing_factor penalty_alpha no_repeat_ngram_size", 0),
    **_refused("top_n_sigma", 0, -1),
    **_refused("functions", [], instead="use tools"),
    **_refused("function_call", "none", "auto", instead="use tool_choice"),
    **_refused("guided_json", instead="use structured_outputs.json"),
    **_refused("guided_regex regex", instead="use structured_outputs.regex"),
    **_refused("guided_choice", instead="use structured_outputs.choice"),
    **_refused("guided_grammar ebnf", instead="use structured_outputs.grammar"),
    **_refused("grammar grammar_string", "", instead="use structured_outputs.grammar"),
    **_refused("json_schema", instead="use response_format.json_schema"),
    **_refused("format", "", instead="use response_format"),
    **_refused("repeat_penalty", 1, instead="use repetition_penalty"),
    **_refused("stopping_strings stop_sequences", [], instead="use stop"),
    **_refused("ban_eos_token", False, instead="use ignore_eos"),
    **_refused("n_probs top_n_tokens", 0, instead="use logprobs and top_logprobs"),
    **_refused("n_predict num_predict", -1, instead="use max_completion_tokens"),
    **_refused("max_new_tokens max_output_tokens", instead="use max_completion_tokens"),
    **_refused("options sampling_params", {}, instead="use its members as fields of the request"),
    **_refused("system", "", instead="use a message with role system"),
    **_refused("images", [], instead="use content parts of the type image_url"),
}
"""Fields of other servers' chat requests."""

NOT_SPOKEN = {
    **_refused("ref_audio ref_text", instead="upload the voice (POST /v1/audio/voices) and name it as voice"),
    **_refused("prompt_audio prompt_text min_len split_granularity timestamp_granularities"),
    **_refused("max_new_tokens", instead="use max_len"),
    **_refused("verify", False),
}
"""Fields of a speech request that a spoken answer cannot have."""


PIXEL_BOUNDS = _refused(
    "min_pixels max_pixels total_pixels", instead="use detail for pictures, fps and max_frames for videos"
)
"""Fields that other servers accept in a part, in its URL object or for all media."""


def refuse(given: msgspec.Struct, refused: Mapping[str, Refused], where: str = "here", at: str = "") -> None:
    """Raise ApiError 400 for the first field that would change the output. at: what precedes its name in its path."""
    for name, one in refused.items():
        value = getattr(given, name)
        if value is not None and not any(_alike(value, harmless) for harmless in one.neutral):
            instead = f"; {one.instead}" if one.instead else ""
            raise invalid(f"{at}{name}", f"not supported {where}{instead}", "unsupported_parameter")


def _alike(value: Any, other: Any) -> bool:
    """Whether two values of JSON are the same: 0 is not false, though Python takes one for the other."""
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _fields(name: str, refused: Mapping[str, Refused], *bases: type[msgspec.Struct]) -> Any:
    described = [(field, Annotated[Any, Meta(description=one.description)], None) for field, one in refused.items()]
    return msgspec.defstruct(name, described, bases=bases, frozen=True, kw_only=True)


Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Stop = Annotated[str, Meta(min_length=1, max_length=1000)]
LogitBias = Annotated[dict[TokenId, Annotated[float, Meta(ge=-MAX_BIAS, le=MAX_BIAS)]], Meta(max_length=MAX_BIASES)]


class SamplingFields(SamplingOptions, frozen=True, kw_only=True):
    """seed: unset, a random one. stop, stop_token_ids: end the answer. ignore_eos: not at the model's own tokens."""

    logit_bias: LogitBias | None = None
    seed: Int64 | None = None
    cache_salt: Annotated[str, Meta(min_length=1)] | None = None
    stop: Stop | Annotated[list[Stop], Meta(max_length=4)] | None = None
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_IDS)] | None = None
    ignore_eos: bool | None = None


if TYPE_CHECKING:

    class RefusedFields(SamplingFields, frozen=True, kw_only=True):
        """SamplingFields, and a field for each name in REFUSED."""

    class UnspokenFields(VoiceOptions, frozen=True, kw_only=True):
        """Fields of speech that a spoken answer has, and one for each name in NOT_SPOKEN."""
else:
    RefusedFields = _fields("RefusedFields", REFUSED, SamplingFields)
    UnspokenFields = _fields("UnspokenFields", NOT_SPOKEN, VoiceOptions)


# Answers that are spoken, as in OpenAI's API, and extensions

Modality = Literal["text", "audio"]


class AudioParams(UnspokenFields, frozen=True, kw_only=True):
    """voice and format are OpenAI's.

    pcm16 has 24 kHz unless sample_rate says otherwise, ulaw and alaw (G.711) have 8 kHz.
    """

    format: ChatFormat
    sample_rate: SampleRate | None = None


class PastAudio(msgspec.Struct, frozen=True):
    """Reference to a past spoken answer, of which the model reads the transcript: as sent, or in the id."""

    id: str | None = None
    transcript: str | None = None


ID_PREFIX = "audio_"
ID_LIFETIME = 365 * 86_400
"""Seconds that ids are said to be valid. They hold their transcripts, so nothing expires."""
MAX_TRANSCRIPT = 1 << 22
"""Bytes of the transcript that an id may stand for."""


def id_of(transcript: str) -> str:
    """Return an id that holds the transcript, since OpenAI's clients send an answer back only as `audio: {id}`."""
    packed = zlib.compress(transcript.encode(errors="replace"))
    return ID_PREFIX + base64.urlsafe_b64encode(packed).decode().rstrip("=")


def transcript_in(id: str) -> str | None:
    """Return the transcript that an id holds; None for an id that `id_of` has not made."""
    packed, reader = id.removeprefix(ID_PREFIX), zlib.decompressobj()
    try:
        text = reader.decompress(base64.urlsafe_b64decode(packed + "=" * (-len(packed) % 4)), MAX_TRANSCRIPT).decode()
    except (ValueError, zlib.error):
        return None
    return text if reader.eof else None


class AnswerAudio(msgspec.Struct, frozen=True):
    """The audio of an answer, or the next part of it in a stream: the next of transcript and data, whose pieces are
    valid base64, also when they are joined; the other fields are in the last part.

    id: stands for the transcript; audio is not kept. finish_reason: "length" if a segment of the speech ended at its
    cap, or the speech ended before the text. steps: those of the speech model. unspoken: letters, digits and signs that
    the speech model cannot speak, each once, if any."""

    id: str | UnsetType = UNSET
    transcript: str | UnsetType = UNSET
    data: str | UnsetType = UNSET
    expires_at: int | UnsetType = UNSET
    finish_reason: Literal["stop", "length"] | UnsetType = UNSET
    steps: StepReport | UnsetType = UNSET
    unspoken: str | UnsetType = UNSET


class FunctionDefinition(msgspec.Struct, frozen=True):
    """parameters: JSON Schema of an object; without it the function has none. PHP writes an empty one as []. strict:
    refuses a schema with keywords that are not supported, which are otherwise not enforced."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | list[Any] | None = None
    strict: bool | None = None


class ToolDefinition(msgspec.Struct, frozen=True):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(msgspec.Struct, frozen=True):
    name: str


class NamedToolChoice(msgspec.Struct, frozen=True, tag_field="type", tag="function"):
    function: NamedFunction


class AllowedTools(msgspec.Struct, frozen=True):
    """mode: auto: text, or text followed by calls of these tools; required: only calls of them."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedToolChoice], Meta(min_length=1)]


class AllowedToolsChoice(msgspec.Struct, frozen=True, tag_field="type", tag="allowed_tools"):
    """The prompt names all tools of the request; some of them may be called."""

    allowed_tools: AllowedTools


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolsChoice


# Tools and choices of /v1/responses and Realtime, which chat nests


class FunctionTool(FunctionDefinition, frozen=True, kw_only=True):
    type: Literal["function"]


class NamedTool(NamedFunction, frozen=True, tag_field="type", tag="function"):
    """The only function that may be called, and has to be."""


class AllowedNamedTools(msgspec.Struct, frozen=True, tag_field="type", tag="allowed_tools"):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Meta(min_length=1)]


FlatToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedNamedTools


def nested(choice: FlatToolChoice | None) -> ToolChoice | None:
    """The choice of a chat request; None: auto."""
    match choice:
        case NamedTool():
            return NamedToolChoice(choice)
        case AllowedNamedTools(mode=mode, tools=tools):
            return AllowedToolsChoice(AllowedTools(mode, [NamedToolChoice(tool) for tool in tools]))
        case _:
            return None if choice == "auto" else choice


class FunctionDelta(msgspec.Struct, frozen=True):
    """name: in the first delta of a call, whose arguments are empty. arguments: the next characters of the JSON."""

    arguments: str
    name: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct, frozen=True):
    """index: of the call in its answer. id, type: in the first delta of a call."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class CalledFunction(msgspec.Struct, frozen=True):
    """arguments: a JSON object, as a string."""

    name: str
    arguments: str


class ToolCallEntry(msgspec.Struct, frozen=True):
    """A call of an answer, in the form in which the next request sends it back."""

    id: str
    function: CalledFunction
    type: Literal["function"] | None = "function"


# Requests


Fps = Annotated[float, Meta(ge=1e-4)]
Frames = Annotated[int, Meta(ge=1, le=2**31 - 1)]
PixelBound = Annotated[Any, Meta(description="not supported: use detail for pictures, fps and max_frames for videos")]


class VideoOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a video is sampled, or all videos of a request that set none of these fields themselves."""

    fps: Fps | None = None
    num_frames: Frames | None = None
    max_frames: Frames | None = None


class MediaOptions(VideoOptions, frozen=True, kw_only=True, forbid_unknown_fields=False):
    min_pixels: PixelBound = None
    max_pixels: PixelBound = None
    total_pixels: PixelBound = None


class MediaUrl(MediaOptions, frozen=True):
    """url: data: or https:. detail: "low" limits the pixels of a picture."""

    url: str
    detail: Literal["auto", "low", "high", "original"] | None = None


class InputAudio(msgspec.Struct, frozen=True):
    """data: base64 of a file. format: OpenAI's clients name it; the file itself says what it is."""

    data: str
    format: Annotated[str, Meta(pattern=r"^[a-z0-9]{1,16}$")] = "wav"


class ContentPart(MediaOptions, frozen=True):
    """type: text, image_url, video_url, input_audio, or refusal of an assistant; optional when one of these fields is
    set. A video_url that sets no option itself has those of its part."""

    type: str | None = None
    text: str | None = None
    refusal: str | None = None
    image_url: MediaUrl | str | None = None
    video_url: MediaUrl | str | None = None
    input_audio: InputAudio | None = None


class ProcessorOptions(MediaOptions, frozen=True, forbid_unknown_fields=True):
    downsample_mode: Literal["16x", "4x"] | None = None


class MediaIoOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    video: VideoOptions | None = None


class Message(msgspec.Struct, frozen=True):
    """reasoning_content (or reasoning), refusal, tool_calls: of an assistant's message. tool_call_id: of a message with
    role tool, whose call it answers."""

    role: str
    content: str | list[ContentPart] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCallEntry] | None = None
    tool_call_id: str | None = None
    function_call: Annotated[Any, Meta(description="not supported: use tool_calls")] = None
    audio: PastAudio | None = None
    images: Annotated[Any, Meta(description="not supported: use content parts of the type image_url")] = None


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


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's name for what an answer has to match; exactly one of these. json: a schema, as an object or as text."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: Annotated[list[str], Meta(min_length=1)] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class ThinkingSwitch(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["enabled", "disabled"]


class ReasoningOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """OpenRouter's. effort is another name of reasoning_effort; summary is a hint that no model here follows."""

    enabled: bool | None = None
    effort: str | None = None
    summary: str | None = None
    exclude: Annotated[bool, Meta(description="true is not supported: reasoning is always sent")] | None = None


class ChatRequestBody(RefusedFields, frozen=True, kw_only=True):
    """Fields of OpenAI's chat completions and of other servers. enable_thinking, think, thinking,
    reasoning.enabled: other servers' names of chat_template_kwargs.enable_thinking."""

    model: str
    messages: Annotated[list[Message], Meta(min_length=1)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    n: Annotated[int, Meta(ge=1, le=2**31 - 1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    enable_thinking: bool | None = None
    think: bool | None = None
    thinking: bool | ThinkingSwitch | None = None
    reasoning: ReasoningOptions | None = None
    reasoning_effort: str | None = None
    media_io_kwargs: MediaIoOptions | None = None
    mm_processor_kwargs: ProcessorOptions | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    modalities: Annotated[list[Modality], Meta(min_length=1)] | None = None
    audio: AudioParams | None = None

    @property
    def asks_for_speech(self) -> bool:
        return self.audio is not None or "audio" in (self.modalities or ())


# Responses

FinishReason = Literal["stop", "length", "tool_calls"]


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob, frozen=True):
    top_logprobs: list[TopLogprob]


class PromptTokensDetails(msgspec.Struct, frozen=True):
    cached_tokens: int
    text_tokens: int
    image_tokens: int
    video_tokens: int
    audio_tokens: int = 0


class CompletionTokensDetails(msgspec.Struct, frozen=True):
    reasoning_tokens: int = 0
    audio_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails = CompletionTokensDetails()


class Logprobs(msgspec.Struct, frozen=True):
    content: list[TokenLogprob]
    refusal: None = None


def reasoned(text: str) -> dict[str, Any]:
    """The fields of a message or delta that have its reasoning, by the names that clients read: reasoning_content
    (DeepSeek, SGLang, vLLM before 0.16) and reasoning (OpenRouter, Ollama, vLLM)."""
    return {"reasoning_content": text or UNSET, "reasoning": text or UNSET}


class AnswerMessage(msgspec.Struct, frozen=True):
    """content: null in an answer of calls alone, and when the answer is spoken: audio then has the transcript."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
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
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET
    audio: AnswerAudio | UnsetType = UNSET


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
