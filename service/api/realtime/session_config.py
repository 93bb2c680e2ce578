"""The configuration of a session and of one response: what clients send, and what is in force."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from service.api.chat.schema import ChatRequestBody, Int64, Message
from service.api.chat.spoken import check_audio
from service.api.chat.spoken_schema import AudioParams, Modality
from service.api.chat.tool_schema import FunctionDefinition, NamedFunction, NamedToolChoice, ToolDefinition
from service.api.chat.tools import MAX_TOOLS, checked_tool_grammar, tool_use
from service.api.context import ServerContext
from service.api.http.errors import ApiError, bad_request
from service.api.realtime.items import NO_RECOGNITION, ConversationItem
from service.api.realtime.to_messages import renamed
from service.api.speech.schema import VoiceOptions
from service.hub.catalog import OPENAI_PCM_RATE
from service.media.audio_formats import FORMATS, G711_RATE, SPOKEN, STREAMED, StreamedType


async def check_update(context: ServerContext, given: SessionParams, config: RealtimeConfig, client: str) -> None:
    """ApiError names the field that no response could use. given: the fields that the client sets. config: with them.
    client: identifies the client, since clients take turns at the check of grammars."""
    try:
        output = None if given.audio is None else given.audio.output
        named = () if output is None else (output.model, output.voice, output.inference_timesteps)
        if any(value is not None for value in named):
            check_audio(context, config.audio, client)
        await _check_tools(context, given, config, client)
    except ApiError as error:
        raise renamed(error, "session") from error


async def _check_tools(context: ServerContext, given: SessionParams, config: RealtimeConfig, client: str) -> None:
    """A choice of the session that a later update may still provide with tools is left to the response."""
    named = given.tool_choice if isinstance(given.tool_choice, RealtimeToolChoice) else None
    if given.tools is None and named is None:
        return
    fields = chat_tools(msgspec.structs.replace(config, tool_choice=named or "auto"))
    body = ChatRequestBody(model="", messages=[Message("user", "")], **fields)
    use = await context.in_thread(partial(tool_use, body))
    if use is None or given.tools is None:
        return
    try:
        await checked_tool_grammar(context.grammars, replace(use, callable=use.tools, forced=False), client)
    except ApiError as error:
        if error.status < 500:  # if the server is busy, the response is checked
            raise


T = TypeVar("T", bound=msgspec.Struct)

Modalities = Annotated[list[Modality], Meta(min_length=1, max_length=2)]
Tokens = Annotated[int, Meta(ge=1)] | Literal["inf"]
Temperature = Annotated[float, Meta(ge=0, le=2)]
Instructions = Annotated[str, Meta(max_length=65_536)]
Refused = Annotated[Any, Meta(description="not supported: only a value that changes nothing is accepted")]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "tracing": ({},),
    "prompt": ({},),
    "include": ([],),
    "reasoning": ({},),
    "audio.input.turn_detection": (False,),
    "audio.input.transcription": (),
    "audio.input.noise_reduction": (),
}
"""Unsupported fields, with the values beside null that change nothing and are accepted."""


class RealtimeFormat(msgspec.Struct, frozen=True, kw_only=True):
    """audio/pcm: 16-bit mono samples, little-endian, at 24 kHz. audio/pcmu, audio/pcma: G.711 at 8 kHz."""

    type: StreamedType = "audio/pcm"
    rate: Annotated[int, Meta(ge=1, le=192_000)] | None = None

    @property
    def sample_rate(self) -> int:
        return OPENAI_PCM_RATE if self.type == "audio/pcm" else G711_RATE

    @property
    def bytes_per_second(self) -> int:
        return self.sample_rate * FORMATS[SPOKEN[STREAMED[self.type]]].bits // 8


PCM = RealtimeFormat(rate=OPENAI_PCM_RATE)


class RealtimeOutput(VoiceOptions, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """format, voice and speed are OpenAI's."""

    format: RealtimeFormat | None = None


class RealtimeInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Audio that clients send. There is no speech recognition, so all fields except format are null."""

    format: Any = None
    turn_detection: Any = None
    transcription: Any = None
    noise_reduction: Any = None


class RealtimeAudio(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    input: RealtimeInput | None = None
    output: RealtimeOutput | None = None


class TokenLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """post_instructions: the most tokens that the conversation may have, not counting the instructions and the
    tools."""

    post_instructions: Annotated[int, Meta(ge=1, le=2**31)] | None = None


class RetentionRatio(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Once a conversation is too long, its oldest turns are dropped until this share of the most tokens is left, and
    stay dropped: the next turns find the beginning of the prompt in the cache."""

    type: Literal["retention_ratio"]
    retention_ratio: Annotated[float, Meta(ge=0, le=1)]
    token_limits: TokenLimits | None = None


Truncation = Literal["auto", "disabled"] | RetentionRatio


class RealtimeTool(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A function that answers may call, with the fields of a chat request's `function`."""

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class RealtimeToolChoice(msgspec.Struct, frozen=True, kw_only=True):
    type: Literal["function"]
    name: str


class _Overrides(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields that both a session and a response may set. modalities: the older name of output_modalities. temperature,
    seed: of the chat model."""

    output_modalities: Modalities | None = None
    modalities: Modalities | None = None
    instructions: Instructions | None = None
    max_output_tokens: Tokens | None = None
    audio: RealtimeAudio | None = None
    temperature: Temperature | None = None
    seed: Int64 | None = None
    tools: list[RealtimeTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | RealtimeToolChoice | None = None
    parallel_tool_calls: bool | None = None
    prompt: Refused = None
    reasoning: Refused = None


class SessionParams(_Overrides, frozen=True, kw_only=True):
    """A session.update: fields that are left out, or null, stay as they are. Unsupported ones are left out of it, and
    named by session.updated."""

    type: Literal["realtime", "transcription"] = "realtime"
    model: str | None = None
    truncation: Truncation | None = None
    tracing: Refused = None
    include: Refused = None


class UnsupportedField(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a session.update that is not in force. param: its path."""

    param: str
    message: str


class ResponseParams(_Overrides, frozen=True, kw_only=True):
    """The configuration of one response. conversation "none": the answer is not added to the conversation. input: items
    to answer instead of the conversation's, new ones or references to those."""

    conversation: Literal["auto", "none"] | None = None
    input: list[ConversationItem] | None = None
    metadata: Metadata | None = None


class RealtimeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The configuration in force. output_modalities has one entry: audio comes with its transcript."""

    output_modalities: list[Modality]
    instructions: str = ""
    max_output_tokens: Tokens = "inf"
    output: RealtimeOutput = RealtimeOutput(format=PCM)
    truncation: Truncation = "disabled"
    temperature: float | None = None
    seed: int | None = None
    tools: list[RealtimeTool] = []
    tool_choice: Literal["none", "auto", "required"] | RealtimeToolChoice = "auto"
    parallel_tool_calls: bool = True

    @property
    def spoken(self) -> bool:
        return "audio" in self.output_modalities

    @property
    def audio(self) -> AudioParams:
        given = {name: getattr(self.output, name) for name in VoiceOptions.__struct_fields__}
        return AudioParams(format=STREAMED[self.format.type], sample_rate=self.format.sample_rate, **given)

    @property
    def format(self) -> RealtimeFormat:
        return self.output.format or PCM


class RealtimeSession(msgspec.Struct, frozen=True, kw_only=True):
    """A session as clients see it."""

    id: str
    model: str
    output_modalities: list[Modality]
    instructions: str
    max_output_tokens: Tokens
    audio: RealtimeAudio
    temperature: float | UnsetType = UNSET
    seed: int | UnsetType = UNSET
    type: Literal["realtime"] = "realtime"
    object: Literal["realtime.session"] = "realtime.session"
    tools: list[RealtimeTool]
    tool_choice: Literal["none", "auto", "required"] | RealtimeToolChoice
    parallel_tool_calls: bool
    truncation: Truncation


def updated(config: RealtimeConfig, given: _Overrides, field: str) -> RealtimeConfig:
    """The configuration with the fields that `given` sets. ApiError names the unsupported field below `field`."""
    hearing = None if given.audio is None else given.audio.input
    fields = {"prompt": given.prompt, "reasoning": given.reasoning, "audio": {"input": msgspec.to_builtins(hearing)}}
    for refused in take_unsupported(fields, field):
        raise bad_request(refused.message, refused.param, "unsupported_parameter")
    if given.tools is not None and len(given.tools) > MAX_TOOLS:
        at = f"{field}.tools"
        raise bad_request(f"{at}: too many: {len(given.tools)} given, at most {MAX_TOOLS} allowed.", at)
    config = _overlaid(config, given)
    if given.audio is not None and given.audio.output is not None:
        output = _overlaid(config.output, given.audio.output)
        if output.format is not None:
            output = msgspec.structs.replace(output, format=_checked(output.format, f"{field}.audio.output.format"))
        config = msgspec.structs.replace(config, output=output)
    modalities = given.output_modalities or given.modalities
    if modalities is None:
        return config
    return msgspec.structs.replace(config, output_modalities=["audio" if "audio" in modalities else "text"])


def shown(config: RealtimeConfig, id: str, model: str) -> RealtimeSession:
    return RealtimeSession(
        id=id,
        model=model,
        output_modalities=config.output_modalities,
        instructions=config.instructions,
        max_output_tokens=config.max_output_tokens,
        audio=RealtimeAudio(input=RealtimeInput(format=PCM), output=config.output),
        temperature=UNSET if config.temperature is None else config.temperature,
        seed=UNSET if config.seed is None else config.seed,
        tools=config.tools,
        tool_choice=config.tool_choice,
        parallel_tool_calls=config.parallel_tool_calls,
        truncation=config.truncation,
    )


def chat_tools(config: RealtimeConfig) -> dict[str, Any]:
    """The fields of a chat request that describe the tools."""
    asked = config.tool_choice
    if not config.tools and asked in ("none", "auto"):
        return {}
    choice = asked if isinstance(asked, str) else NamedToolChoice(NamedFunction(asked.name))
    tools = [
        ToolDefinition("function", FunctionDefinition(tool.name, tool.description, tool.parameters))
        for tool in config.tools
    ]
    return {"tools": tools, "tool_choice": choice, "parallel_tool_calls": config.parallel_tool_calls}


def _checked(given: RealtimeFormat, field: str) -> RealtimeFormat:
    """The format as clients see it, with its sample rate."""
    if given.rate not in (None, given.sample_rate):
        message = f"{field}.rate: {given.rate} given, must be {given.sample_rate} for {given.type}."
        raise bad_request(message, f"{field}.rate")
    return RealtimeFormat(type=given.type, rate=given.sample_rate)


def _overlaid(base: T, given: msgspec.Struct) -> T:
    """`base`, with the fields that `given` sets."""
    values = {name: getattr(given, name, None) for name in base.__struct_fields__}
    return msgspec.structs.replace(base, **{name: value for name, value in values.items() if value is not None})


def take_unsupported(
    given: dict[str, Any], field: str, kind: type[msgspec.Struct] = SessionParams, below: str = ""
) -> list[UnsupportedField]:
    """Remove what this server does not support from the JSON of a session's fields. field: the path of the session.
    kind: the type of `given`, which is at the path `below` of the session."""
    taken = []
    for name, value in list(given.items()):
        path = f"{below}{name}"
        inner = NESTED.get(path)
        if value is None:
            continue
        if path == "tools" and isinstance(value, list):
            others = [n for n, tool in enumerate(value) if isinstance(tool, dict) and tool.get("type") in OTHER_TOOLS]
            taken += [_unsupported(f"{field}.tools[{n}]", "only functions are supported") for n in others]
            given[name] = [tool for n, tool in enumerate(value) if n not in others]
        elif inner is not None and isinstance(value, dict):
            taken += take_unsupported(value, field, inner, f"{path}.")
        elif name not in kind.__struct_fields__:
            taken.append(_unsupported(f"{field}.{path[:MAX_PATH]}", "there is no such field"))
            del given[name]
        elif path in UNSUPPORTED and not any(value == harmless for harmless in UNSUPPORTED[path]):
            reason = f"must be null: {NO_RECOGNITION}" if below else "not supported by this server"
            taken.append(_unsupported(f"{field}.{path}", reason))
            del given[name]
    return taken


NESTED: dict[str, type[msgspec.Struct]] = {
    "audio": RealtimeAudio,
    "audio.input": RealtimeInput,
    "audio.output": RealtimeOutput,
}
"""Objects of a session in which unsupported fields are looked for."""
OTHER_TOOLS = ("mcp", "web_search", "file_search", "code_interpreter")
"""Types of tools that OpenAI's servers run themselves."""
MAX_PATH = 100
"""Characters of the path of a field that a client names."""


def _unsupported(param: str, reason: str) -> UnsupportedField:
    return UnsupportedField(param=param, message=f"{param}: {reason}.")
