"""A load: its shape in time, its requests, and the measurements of each."""

from __future__ import annotations

from typing import Literal

import msgspec


class Load(msgspec.Struct, frozen=True, tag_field="endpoint"):
    """Requests against one server.

    Closed loop: `concurrency` requests are always open. Open loop: `rate` requests a second, Poisson arrivals.
    `warmup` extra requests run first, one by one, and are not measured.
    """

    url: str
    model: str
    requests: int
    seed: int
    concurrency: int = 0
    rate: float = 0.0
    warmup: int = 2
    api_key: str | None = None
    timeout: float = 300.0


class ChatLoad(Load, frozen=True, tag="chat"):
    """Chat requests of new random JPEG pictures and new random text each, so that no cache can hit but for what a load
    asks for: a system prompt that all requests share, and conversations.

    text_words: ordinary words in the place of `text_characters` random letters and digits.
    system_tokens: words of the system prompt of all requests, about a token each; 0: a short one for each request.
    system_message: False: none, so that the chat template puts its own where it has one.
    turns: questions of a conversation about its pictures, each with the answers so far before it; `requests` and the
    arrivals of an open loop then count conversations, and each turn has a Record.
    temperature: of the sampler. json_schema: the schema that answers follow, as text; "": none.
    """

    images: int = 1
    width: int = 448
    height: int = 448
    text_characters: int = 128
    text_words: int = 0
    system_tokens: int = 0
    system_message: bool = True
    turns: int = 1
    output_tokens: int = 64
    temperature: float = 0.0
    json_schema: str = ""


class SpeechLoad(Load, frozen=True, tag="speech"):
    """Speech requests with new random text each; `seconds` caps the audio of one (0: the server decides). voices: one
    of them is drawn for each request."""

    text_words: int = 12
    seconds: float = 0.0
    response_format: str = "pcm"
    solver_steps: int | None = None
    voices: tuple[str, ...] = ("default",)


AnyLoad = ChatLoad | SpeechLoad


class Record(msgspec.Struct):
    """The client's measurements of one request. Times in seconds; `start` is on the machine's wall clock.

    first: until the first token or the first audio byte. duration: until the last byte.
    tokens: completion tokens; gaps: between consecutive events that carried output.
    audio: seconds of audio; underrun: seconds for which a player that began at the first byte had nothing to play.
    delay: open loop: from the moment that was drawn for the request until its client sent it.
    turn: of a conversation, from 1; a later one follows its answer at once and has no delay.
    message: the server's words on a refusal, or what the client saw of a failure.
    """

    start: float
    status: int
    first: float = 0.0
    duration: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    gaps: list[float] = []
    audio: float = 0.0
    underrun: float = 0.0
    delay: float = 0.0
    turn: int = 1
    error: Literal["", "refused", "failed"] = ""
    message: str = ""


class Assignment(msgspec.Struct, frozen=True):
    """One client process's share of a load: send at `offsets` (seconds after the beginning, open loop) or keep `lanes`
    requests open until `count` are done (closed loop), beginning `after` seconds later than the others and sending
    nothing from `until` seconds on after their beginning (0: no end)."""

    load: AnyLoad
    seed: int
    lanes: int
    count: int
    offsets: tuple[float, ...] = ()
    after: float = 0.0
    until: float = 0.0
