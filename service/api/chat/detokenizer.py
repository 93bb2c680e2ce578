"""From generated tokens to text deltas: UTF-8 across tokens, stop strings, reasoning, tool calls, log probabilities."""

from __future__ import annotations

import codecs
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import msgspec
from msgspec import UNSET

from models.text.tools import CALL_END, CALL_START
from service.api.chat import schema
from service.api.chat.xml_calls import FUNCTION, Types, XmlCall, held_back, split_at
from service.link.messages import ChatDelta, TokenInfo

CALL_HEAD = '\n{"name": "'
"""What follows the opening tag of every call that the grammar allows, in JSON."""
_HEAD = re.compile(r'\n\{"name": "([^"]*)", "arguments": ')
_JSON_END = f"}}\n{CALL_END}"


def joined(deltas: Sequence[schema.ToolCallDelta]) -> list[schema.ToolCallEntry]:
    begun = [delta for delta in deltas if delta.id is not UNSET]
    arguments: list[list[str]] = [[] for _ in begun]
    for delta in deltas:
        arguments[delta.index].append(delta.function.arguments)
    return [
        schema.ToolCallEntry(str(first.id), schema.CalledFunction(str(first.function.name), "".join(fragments)))
        for first, fragments in zip(begun, arguments, strict=True)
    ]


class JsonCall:
    """Reads a call from behind its opening tag, in chunks, as the grammar writes it: no new line is in its JSON."""

    def __init__(self) -> None:
        self._held = ""
        self._named = False

    def feed(self, text: str) -> tuple[list[schema.FunctionDelta], str | None]:
        """(parts of the call, what follows its closing tag; None while it goes on)."""
        self._held += text
        deltas: list[schema.FunctionDelta] = []
        if not self._named:
            found = _HEAD.match(self._held)
            if found is None:
                return [], None
            self._named, self._held = True, self._held[found.end() :]
            deltas.append(schema.FunctionDelta("", found[1]))
        arguments, ended, self._held = split_at(self._held, _JSON_END)
        if arguments:
            deltas.append(schema.FunctionDelta(arguments))
        return deltas, self._held if ended else None


class ToolCallParser:
    """Splits an answer into text and calls. What it returns does not depend on how the text is cut into chunks.

    calls: number of calls that have begun. White space around calls is dropped. forced: the answer consists of calls,
    so it has no text, even if it is cut within the first tag. either: the answer consists of calls, or of a text that
    matches a format: tags inside that text belong to it. xml: the types of each function's parameters, where calls are
    in the form of service/api/chat/xml_calls.py.
    """

    def __init__(
        self, *, forced: bool = False, either: bool = False, xml: Mapping[str, Mapping[str, Types]] | None = None
    ) -> None:
        self.calls = 0
        self.forced = forced
        self._state: Literal["undecided", "said", "text", "call"]
        self._state = "undecided" if either and not forced else "text"
        self._held = ""
        self._new_call: Callable[[], JsonCall | XmlCall] = JsonCall if xml is None else partial(XmlCall, xml)
        self._opening = CALL_START + (CALL_HEAD if xml is None else FUNCTION)
        self._call: JsonCall | XmlCall = self._new_call()

    @property
    def in_call(self) -> bool:
        """Whether the text so far ends between the tags of a call, or of what may still become one."""
        if self._state == "undecided":
            return self._held.lstrip("\n").startswith(CALL_START)
        return self._state == "call"

    def feed(self, text: str) -> tuple[str, list[schema.ToolCallDelta]]:
        """(text, parts of calls) of the next chunk."""
        self._held += text
        said, deltas = "", []
        while True:
            state = self._state
            if state == "undecided":
                self._decide()
            elif state == "said":
                said, self._held = said + self._held, ""
            elif state == "text":
                said += self._take_text()
            else:
                deltas += self._take_call()
            if self._state == state:
                return said, deltas

    def flush(self, *, complete: bool = False) -> str:
        """Text that was held back, at the end of the answer. A call without arguments is dropped. complete: the answer
        has ended by itself, so what might have become a call is a text."""
        text = (complete and self._state == "undecided") or not self.in_call
        held, self._held = self._held, ""
        return held if text and not self.forced and not (self.calls and held.isspace()) else ""

    def _decide(self) -> None:
        """Whether the answer is calls or a text, as soon as its beginning tells."""
        begun = self._held.lstrip("\n")
        if begun.startswith(self._opening):
            self._state = "text"
        elif not self._opening.startswith(begun):
            self._state = "said"

    def _take_text(self) -> str:
        """Text up to the next tag. Holds back what may be the beginning of a tag, and white space that may precede
        one."""
        head, tag, rest = split_at(self._held, CALL_START)
        said = head.rstrip()
        if tag:
            self._state, self._held, self._call = "call", rest, self._new_call()
        else:
            self._held = head[len(said) :] + rest
        return said

    def _take_call(self) -> list[schema.ToolCallDelta]:
        parts, rest = self._call.feed(self._held)
        if rest is not None:
            self._state = "text"
        self._held = rest or ""
        deltas = []
        for part in parts:
            if part.name is UNSET:
                deltas.append(schema.ToolCallDelta(self.calls - 1, part))
            else:
                self.calls += 1
                deltas.append(schema.ToolCallDelta(self.calls - 1, part, f"call_{secrets.token_hex(12)}", "function"))
        return deltas


Detokenize = Callable[[Sequence[int]], bytes]

MIN_LOGPROB = -9999.0
"""Replaces minus infinity, which JSON cannot express."""


class StopCutter:
    """Pass text on up to the stop string that is complete first, of several the longest; hold back what may begin one.
    The result does not depend on how the text is split into chunks."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """The text that can be sent now; nothing after a stop string."""
        if self.stopped or not self._stops:
            return "" if self.stopped else text
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)[1]]
        kept = len(text) - max(held_back(text, stop) for stop in self._stops)
        self._held = text[kept:]
        return text[:kept]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


class ReasoningSplitter:
    """Separate the text between a model's reasoning markers (<think>, </think>) from the content. Reasoning can only
    come first. opened: the prompt itself ended with the opening marker."""

    def __init__(self, markers: tuple[str, str] | None, *, opened: bool = False) -> None:
        self._start, self._end = markers or ("", "")
        self._state = "content" if markers is None else "reasoning" if opened else "undecided"
        self._held = ""

    @property
    def in_reasoning(self) -> bool:
        return self._state == "reasoning"

    def feed(self, text: str) -> tuple[str, str]:
        """(reasoning, content) of the next chunk of text."""
        if self._state == "content" and not self._held:
            return "", text
        self._held += text
        if self._state == "undecided":
            begun = self._held.lstrip()
            if begun.startswith(self._start):
                self._state, self._held = "reasoning", begun[len(self._start) :]
            elif not self._start.startswith(begun):
                self._state = "content"
            else:
                return "", ""
        if self._state == "reasoning":
            thought, ended, self._held = split_at(self._held, self._end)
            if not ended:
                return thought, ""
            self._state = "after"
            return thought, self._after()
        return "", self._after() if self._state == "after" else self._release()

    def _after(self) -> str:
        """Drop newlines between the closing marker and the content."""
        self._held = self._held.lstrip("\n")
        if self._held:
            self._state = "content"
        return self._release()

    def flush(self) -> tuple[str, str]:
        return (self._release(), "") if self._state == "reasoning" else ("", self._release())

    def _release(self) -> str:
        held, self._held = self._held, ""
        return held


class TextDelta(msgspec.Struct, frozen=True):
    content: str
    reasoning: str
    logprobs: tuple[schema.TokenLogprob, ...]
    """Of the tokens whose first character has been sent by now; each token once."""
    finish_reason: schema.FinishReason | None
    """None: more follows."""
    calls: tuple[schema.ToolCallDelta, ...] = ()


@dataclass
class _Parts:
    """The text that is not in a delta yet."""

    reasoning: str = ""
    content: str = ""
    calls: list[schema.ToolCallDelta] = field(default_factory=list)


class TextAssembler:
    """Assemble the text of one choice.

    tokens: number so far, including the one that completed a stop string. reasoning_tokens: those up to the end of the
    reasoning, markers included. Stop strings count after the first `min_tokens` tokens, and not inside tool calls.
    """

    def __init__(
        self,
        detokenize: Detokenize,
        stops: Sequence[str],
        *,
        min_tokens: int = 0,
        reasoning_markers: tuple[str, str] | None = None,
        reasoning_opened: bool = False,
        calls: ToolCallParser | None = None,
    ) -> None:
        """calls: given if the answer may call tools. reasoning_opened: the prompt ends with the opening marker."""
        self.tokens = 0
        self.reasoning_tokens = 0
        self._detokenize = detokenize
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # An answer of tool calls alone has no text that a stop string could end.
        self._cutter = StopCutter(() if calls is not None and calls.forced else stops)
        self._splitter = ReasoningSplitter(reasoning_markers, opened=reasoning_opened)
        self._calls = calls
        self._min_tokens = min_tokens
        self._decoded = 0
        """Characters decoded so far; `_shown` of them have passed the stop cutter."""
        self._shown = 0
        self._waiting: list[tuple[int, schema.TokenLogprob]] = []
        """(first character, logprobs) of tokens whose text has not been sent yet."""
        self._parts = _Parts()

    def feed(self, delta: ChatDelta) -> TextDelta:
        """The text of new tokens. finish_reason "stop" after a stop string: the caller then aborts the request."""
        for index, token in enumerate(delta.token_ids):
            self.tokens += 1
            raw = self._detokenize([token])
            if delta.infos:
                self._waiting.append((self._decoded, self._logprob(raw, delta.infos[index])))
            self._cut(self._utf8.decode(raw))
            if self._cutter.stopped:
                return self._last("stop")
        if delta.finish_reason is None:
            return self._taken(None)
        self._cut(self._utf8.decode(b"", final=True))
        self._split(self._cutter.flush())
        at_length = delta.finish_reason == "length" and not self._cutter.stopped
        return self._last("length" if at_length else "stop")

    def _cut(self, text: str) -> None:
        self._decoded += len(text)
        if self.tokens <= self._min_tokens:
            self._split(text)
        elif self._calls is None:
            self._split(self._cutter.feed(text))
        else:
            for character in text:  # a call may begin or end at any of them
                self._split(character if self._calls.in_call else self._cutter.feed(character))

    def _split(self, text: str) -> None:
        """Add text that can be sent. Counts reasoning tokens."""
        self._shown += len(text)
        inside = self._splitter.in_reasoning
        reasoning, content = self._splitter.feed(text)
        if inside or reasoning or self._splitter.in_reasoning:
            self.reasoning_tokens = self.tokens
        self._say(reasoning, content)

    def _say(self, reasoning: str, content: str) -> None:
        self._parts.reasoning += reasoning
        if self._calls is not None:
            content, calls = self._calls.feed(content)
            self._parts.calls += calls
        self._parts.content += content

    def _last(self, finish_reason: schema.FinishReason) -> TextDelta:
        self._say(*self._splitter.flush())
        if self._calls is not None:
            self._parts.content += self._calls.flush(complete=finish_reason == "stop")
            if self._calls.calls and finish_reason == "stop":
                finish_reason = "tool_calls"
        if not self._cutter.stopped:
            self._shown += 1  # tokens without text at the very end
        return self._taken(finish_reason)

    def _taken(self, finish_reason: schema.FinishReason | None) -> TextDelta:
        parts, self._parts = self._parts, _Parts()
        return TextDelta(parts.content, parts.reasoning, self._ready(), finish_reason, tuple(parts.calls))

    def _ready(self) -> tuple[schema.TokenLogprob, ...]:
        if not self._waiting:
            return ()
        ready = tuple(entry for start, entry in self._waiting if start < self._shown)
        self._waiting = self._waiting[len(ready) :]
        return ready

    def _logprob(self, raw: bytes, info: TokenInfo) -> schema.TokenLogprob:
        top = []
        for token, logprob in info.top:
            alternative = self._detokenize([token])
            top.append(schema.TopLogprob(_text(alternative), max(logprob, MIN_LOGPROB), list(alternative)))
        return schema.TokenLogprob(_text(raw), max(info.logprob, MIN_LOGPROB), list(raw), top)


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")
