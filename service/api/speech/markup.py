"""Removes Markdown, HTML tags and emoji from texts that are to be spoken."""

from __future__ import annotations

import re

# Every pattern takes linear time: quantifiers are bounded or cannot match their own opening character.
FENCED_CODE = re.compile(r"```.*?(?:```|\Z)", re.DOTALL)
INLINE_CODE = re.compile(r"`[^`\n]*`")
LINK_TARGET = r"\([^()\n]{0,2000}(?:\([^()\n]{0,200}\)[^()\n]{0,200})?\)"
IMAGE = re.compile(r"!\[[^\[\]]{0,2000}\]" + LINK_TARGET)
LINK = re.compile(r"\[(?![pP][aA][uU][sS][eE]:[\d.\s]{1,16}m?s\s*\])([^\[\]]{1,2000})\]" + LINK_TARGET)
"""A pause before a word in parentheses is no link."""
BLOCKS = "address|article|blockquote|br|dd|div|dl|dt|h[1-6]|hr|li|ol|p|section|table|td|th|tr|ul"
HTML_TAG = re.compile(
    r"<(https?://[^\s<>]{1,2000}|[A-Za-z][^\s<>@/]{0,63}@[^\s<>@/]{1,255})>"
    rf"|(?<=\S)(?P<block></?(?i:{BLOCKS})(?:[\s/][^<>]{{0,2000}})?>)(?=\S)|</?[A-Za-z][^<>]{{0,2000}}>"
)
"""Or an address, group 1: <https://example.com>. block: between two words."""
HTML_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
HEADING = re.compile(r"^[ \t]{0,3}#{1,6}[ \t]+", re.MULTILINE)
LIST_MARK = re.compile(r"^[ \t]{0,16}[-*+•][ \t]+", re.MULTILINE)
QUOTE_MARK = re.compile(r"^[ \t]{0,3}>[ \t]?", re.MULTILINE)
RULE = re.compile(r"^[ \t]{0,3}(?:-{3,}|\*{3,}|_{3,})[ \t]*$", re.MULTILINE)
EMPHASIS = re.compile(
    r"(?<!\d)\*\*\*?|(?<=\d)\*\*\*?(?!\d)|~~|"
    r"(?<![^\W_])__?(?=[^\W_])|(?<=[^\W_])__?(?![^\W_])|(?<![\w*])\*(?=\w)|(?<=[^\W\d])\*(?!\w)"
)
"""2**3 is a power."""

_PICTURE = (
    "[\U0001f000-\U0001faff\u2600-\u27bf\u231a\u231b\u2328\u23cf\u23e9-\u23fa\u25fb-\u25fe\u2b05-\u2b07\u2b1b\u2b1c"
    "\u2b50\u2b55\u3030\u303d]"
)
_MODIFIER = "[\ufe0f\u20e3\U0001f3fb-\U0001f3ff\U000e0020-\U000e007f]"
# A zero-width joiner is removed only between two emoji; Indic scripts and Persian need theirs.
EMOJI = re.compile(f"{_PICTURE}{_MODIFIER}*(?:\u200d{_PICTURE}{_MODIFIER}*)*|{_MODIFIER}")

# How a chunk of text may end inside a mark, once the complete marks are removed.
OPENING = re.compile(r"[`<\[]")
OPEN_CODE = re.compile(r"`[^`\n]*\Z")
OPEN_TARGET = re.compile(r"\]\([^()\n]*(?:\([^()\n]*\)?[^()\n]*)?\Z")
OPEN_TAG = re.compile(r"</?[A-Za-z][^<>]{0,2000}\Z")
SOLID = re.compile(r"[^\s*+•>#_~-]")
"""Marks at the beginning of a line (headings, lists, ...) can only stand before the first such character."""
PLAIN = frozenset(".,;:?…。，！？；：、")
_OPENINGS_TRIED = 3
_LONGEST_SIGNS = 64


def _in_place_of(tag: re.Match[str]) -> str:
    """The address in a tag; a space where the words around it would become one."""
    return tag[1] or (" " if tag["block"] else "")


MARKS = tuple(
    (frozenset(signs), mark, instead)
    for signs, mark, instead in (
        ("<", HTML_COMMENT, ""),
        ("<", HTML_TAG, _in_place_of),
        ("-*_", RULE, ""),
        (">", QUOTE_MARK, ""),
        ("#", HEADING, ""),
        ("-*+•", LIST_MARK, ""),
        ("*~_", EMPHASIS, ""),
    )
)
"""(characters, mark, what stands in its place): each match has one of the characters. In the order in which marks are
removed."""

STRAIGHT_QUOTES = str.maketrans({"“": '"', "”": '"', "„": '"', "‘": "'", "’": "'", "‚": "'"})


def strip_markup(text: str) -> str:
    """The text without Markdown, HTML tags and emoji, and with straight quotes.

    Removes fenced and inline code, images, tags, rules, and the marks of headings, lists, quotes and emphasis. Keeps
    the text of links, addresses in angle brackets and all line breaks. (VoxCPM's text normalisation,
    utils/text_normalize.py, with emphasis and quotations added; numbers are the concern of normalising.)
    """
    # Patterns whose characters do not occur are skipped: most texts have no marks at all.
    if "`" in text:
        text = INLINE_CODE.sub("", FENCED_CODE.sub("", text))
    if "](" in text:
        text = LINK.sub(r"\1", IMAGE.sub("", text))
    present = frozenset(text)
    for signs, mark, instead in MARKS:
        if not signs.isdisjoint(present):
            text = mark.sub(instead, text)
    return text if text.isascii() else EMOJI.sub("", text).translate(STRAIGHT_QUOTES)


class MarkupStripper:
    """`strip_markup` for a text that arrives in chunks: the joined output does not depend on how the text is chunked.

    Text that may belong to an incomplete mark is held back, at most `longest` characters; an open link that is longer,
    for example, keeps its brackets. Code is dropped as it arrives.
    """

    def __init__(self, longest: int = 4096) -> None:
        self._longest = longest
        self._pending = ""
        self._before = ""
        """Stands for the text before the pending one; empty at the start of the text, where a line begins."""

    def feed(self, text: str) -> str:
        """The text that later chunks cannot change any more."""
        pending = self._pending = self._without_code(self._pending + text)
        # Candidates: the end, and before each of the last characters that may have opened a mark.
        openings = [match.start() for match in OPENING.finditer(pending)][-_OPENINGS_TRIED:]
        for stop in (len(pending), *reversed(openings)):
            place = self._place(stop)
            if place and self._is_decided(pending[:place]):
                return self._release(place)
        return self._release(self._place(len(pending)) or len(pending)) if len(pending) > self._longest else ""

    def flush(self) -> str:
        """The rest; the text ends here. A new text may be fed afterwards."""
        rest = self._release(len(self._pending))
        self._before = ""
        return rest

    def _without_code(self, text: str) -> str:
        """Drops the content of an open code fence, except for what may be the beginning of its end."""
        begin = _open(FENCED_CODE, text, "```", "```")
        return text if begin is None else text[: begin + 3] + text[max(begin + 3, len(text) - 2) :]

    def _place(self, stop: int) -> int:
        """The last position up to `stop` at which a split does not cut through a complete mark; 0 if none is near."""
        pending = self._pending
        for place in range(stop, max(0, stop - _LONGEST_SIGNS), -1):
            if _plain(pending[place - 1]) or (place < len(pending) and pending[place].isspace()):
                return place
        return 0

    def _is_decided(self, text: str) -> bool:
        """Whether the marks in `text` stay the same whatever follows."""
        text = self._before + text
        if _open(FENCED_CODE, text, "```", "```") is not None:
            return False
        for mark in (FENCED_CODE, INLINE_CODE, IMAGE):
            text = mark.sub("", text)
        text = LINK.sub(r"\1", text)
        if OPEN_CODE.search(text) or text.rfind("[") > text.rfind("]") or OPEN_TARGET.search(text):
            return False
        if _open(HTML_COMMENT, text, "<!--", "-->") is not None:
            return False
        text = HTML_TAG.sub("", HTML_COMMENT.sub("", text))
        return not OPEN_TAG.search(text) and SOLID.search(text, text.rfind("\n") + 1) is not None

    def _release(self, place: int) -> str:
        text, self._pending = self._pending[:place], self._pending[place:]
        stripped = strip_markup(self._before + text)[len(self._before) :]
        if text:
            self._before = text[-1] if _plain(text[-1]) else "x"
        return stripped


def _open(mark: re.Pattern[str], text: str, begin: str, end: str) -> int | None:
    """Start of the last match, if the text ended before its closing mark."""
    matches = [*mark.finditer(text)]
    if not matches or (matches[-1][0].endswith(end) and len(matches[-1][0]) >= len(begin + end)):
        return None
    return matches[-1].start()


def _plain(character: str) -> bool:
    """Whether no mark begins or ends with the character."""
    return character.isalnum() or character in PLAIN
