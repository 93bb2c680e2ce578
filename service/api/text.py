"""From generated tokens to the text that a client sees: UTF-8 across tokens, stop strings, reasoning, logprobs."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from service.engine.messages import ChatDelta, TokenInfo

FinishReason = Literal["stop", "length"]
Detokenize = Callable[[Sequence[int]], bytes]

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


class TopLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class StopCutter:
    """Lets text through up to the first stop string, holding back what may be the beginning of one.

    Of several stop strings the one that is complete first counts, of those that end together the longest, so that
    the cut does not depend on how the text is split into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.stopped = False

    def feed(self, text: str) -> str:
        """The text that is safe to show now. After a stop string nothing more."""
        if self.stopped or not self._stops:
            return "" if self.stopped else text
        text = self._held + text
        found = [(start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = ""
            return text[: min(found)[1]]
        kept = self._held_length(text)
        self._held = text[len(text) - kept :]
        return text[: len(text) - kept]

    def flush(self) -> str:
        """What was held back, once nothing follows."""
        held, self._held = self._held, ""
        return held

    def _held_length(self, text: str) -> int:
        for length in range(min(len(text), self._longest - 1), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stops):
                return length
        return 0


class ReasoningSplitter:
    """Separates text between a family's reasoning markers from the answer.

    Reasoning can only come first: `opened` says that the prompt itself ended with the opening marker.
    """

    def __init__(self, markers: tuple[str, str] | None, *, opened: bool = False) -> None:
        self._start, self._end = markers or ("", "")
        self._state = "answer" if markers is None else "reasoning" if opened else "undecided"
        self._held = ""

    @property
    def in_reasoning(self) -> bool:
        """Whether the text so far ends inside the reasoning."""
        return self._state == "reasoning"

    def feed(self, text: str) -> tuple[str, str]:
        """(reasoning, answer) of the next piece of text."""
        if self._state == "answer" and not self._held:
            return "", text
        self._held += text
        if self._state == "undecided":
            begun = self._held.lstrip()
            if begun.startswith(self._start):
                self._state, self._held = "reasoning", begun[len(self._start) :]
            elif not self._start.startswith(begun):
                self._state = "answer"
            else:
                return "", ""
        if self._state == "reasoning":
            head, marker, rest = self._held.partition(self._end)
            if marker:
                self._state, self._held = "after", rest
                return head, self._after()
            kept = next((n for n in range(len(self._end) - 1, 0, -1) if head.endswith(self._end[:n])), 0)
            self._held = head[len(head) - kept :]
            return head[: len(head) - kept], ""
        return "", self._after() if self._state == "after" else self._release()

    def _after(self) -> str:
        """Newlines between the closing marker and the answer belong to neither."""
        self._held = self._held.lstrip("\n")
        if self._held:
            self._state = "answer"
        return self._release()

    def flush(self) -> tuple[str, str]:
        """What was held back, once nothing follows."""
        return (self._release(), "") if self._state == "reasoning" else ("", self._release())

    def _release(self) -> str:
        held, self._held = self._held, ""
        return held


class TextDelta(msgspec.Struct, frozen=True):
    """finish_reason None: more follows."""

    content: str
    reasoning: str
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None


class TextAssembler:
    """One answer in the making. `tokens` counts what it consumed, the token that completed a stop string included;
    `reasoning_tokens` those up to the end of the reasoning, its markers included.

    Stop strings are looked for behind the first `min_tokens` tokens, in reasoning and answer alike.
    """

    def __init__(
        self,
        detokenize: Detokenize,
        stops: Sequence[str],
        *,
        min_tokens: int = 0,
        reasoning_markers: tuple[str, str] | None = None,
        reasoning_opened: bool = False,
    ) -> None:
        self.tokens = 0
        self.reasoning_tokens = 0
        self._detokenize = detokenize
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._cutter = StopCutter(stops)
        self._splitter = ReasoningSplitter(reasoning_markers, opened=reasoning_opened)
        self._min_tokens = min_tokens
        self._decoded = 0
        """Characters decoded so far; `_shown` of them have left the cutter."""
        self._shown = 0
        self._waiting: list[tuple[int, TokenLogprob]] = []
        """Log probabilities of tokens whose text begins at that character and has not been shown."""

    def feed(self, delta: ChatDelta) -> TextDelta:
        """The text of new tokens. After a stop string, finish_reason is "stop": abort the request."""
        reasoning = content = ""
        for index, token in enumerate(delta.token_ids):
            self.tokens += 1
            raw = self._detokenize([token])
            if delta.infos:
                self._waiting.append((self._decoded, self._logprob(raw, delta.infos[index])))
            text = self._utf8.decode(raw)
            self._decoded += len(text)
            thought, said = self._split(self._cutter.feed(text) if self.tokens > self._min_tokens else text)
            reasoning += thought
            content += said
            if self._cutter.stopped:
                return self._last(reasoning, content, "stop")
        if delta.finish_reason is None:
            return TextDelta(content, reasoning, self._ready(), None)
        text = self._utf8.decode(b"", final=True)
        self._decoded += len(text)
        thought, said = self._split(self._cutter.feed(text) + self._cutter.flush())
        at_length = delta.finish_reason == "length" and not self._cutter.stopped
        return self._last(reasoning + thought, content + said, "length" if at_length else "stop")

    def _split(self, text: str) -> tuple[str, str]:
        """(reasoning, answer) of text that may be shown. Counts the newest token where it is of the reasoning."""
        self._shown += len(text)
        inside = self._splitter.in_reasoning
        reasoning, content = self._splitter.feed(text)
        if inside or reasoning or self._splitter.in_reasoning:
            self.reasoning_tokens = self.tokens
        return reasoning, content

    def _last(self, reasoning: str, content: str, finish_reason: FinishReason) -> TextDelta:
        thought, said = self._splitter.flush()
        if not self._cutter.stopped:
            self._shown += 1  # tokens without text at the very end
        return TextDelta(content + said, reasoning + thought, self._ready(), finish_reason)

    def _ready(self) -> tuple[TokenLogprob, ...]:
        if not self._waiting:
            return ()
        ready = tuple(entry for start, entry in self._waiting if start < self._shown)
        self._waiting = self._waiting[len(ready) :]
        return ready

    def _logprob(self, raw: bytes, info: TokenInfo) -> TokenLogprob:
        top = []
        for token, logprob in info.top:
            alternative = self._detokenize([token])
            top.append(TopLogprob(_text(alternative), max(logprob, LEAST_LOGPROB), list(alternative)))
        return TokenLogprob(_text(raw), max(info.logprob, LEAST_LOGPROB), list(raw), top)


def _text(raw: bytes) -> str:
    return raw.decode(errors="replace")
