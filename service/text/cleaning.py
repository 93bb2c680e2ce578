"""Text as written -> text to be spoken."""

from __future__ import annotations

import re

# Every pattern is linear in the text: quantifiers are bounded or cannot run over their own opening character.
FENCED_CODE = re.compile(r"```.*?(?:```|\Z)", re.DOTALL)
INLINE_CODE = re.compile(r"`[^`\n]*`")
LINK_TARGET = r"\([^()\n]{0,2000}(?:\([^()\n]{0,200}\)[^()\n]{0,200})?\)"
IMAGE = re.compile(r"!\[[^\[\]]{0,2000}\]" + LINK_TARGET)
LINK = re.compile(r"\[([^\[\]]{1,2000})\]" + LINK_TARGET)
HTML_TAG = re.compile(r"</?[A-Za-z][^<>]{0,2000}>")
HTML_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
HEADING = re.compile(r"^[ \t]{0,3}#{1,6}[ \t]+", re.MULTILINE)
LIST_MARK = re.compile(r"^[ \t]{0,16}[-*+•][ \t]+", re.MULTILINE)
QUOTE_MARK = re.compile(r"^[ \t]{0,3}>[ \t]?", re.MULTILINE)
RULE = re.compile(r"^[ \t]{0,3}(?:-{3,}|\*{3,}|_{3,})[ \t]*$", re.MULTILINE)
EMPHASIS = re.compile(r"\*\*|~~|(?<![^\W_])__?(?=[^\W_])|(?<=[^\W_])__?(?![^\W_])|(?<!\w)\*(?=\w)|(?<=[^\W\d])\*(?!\w)")

_PICTURE = (
    "[\U0001f000-\U0001faff\u2600-\u27bf\u231a\u231b\u2328\u23cf\u23e9-\u23fa\u25fb-\u25fe\u2b05-\u2b07\u2b1b\u2b1c"
    "\u2b50\u2b55\u3030\u303d]"
)
_MODIFIER = "[\ufe0f\u20e3\U0001f3fb-\U0001f3ff\U000e0020-\U000e007f]"
# A zero-width joiner belongs to an emoji only between two of them; Indic scripts and Persian need theirs.
EMOJI = re.compile(f"{_PICTURE}{_MODIFIER}*(?:\u200d{_PICTURE}{_MODIFIER}*)*|{_MODIFIER}")

# How a piece of a text may end in the middle of a mark, once the complete ones are gone.
OPENING = re.compile(r"[`<\[]")
OPEN_CODE = re.compile(r"`[^`\n]*\Z")
OPEN_TARGET = re.compile(r"\]\([^()\n]*(?:\([^()\n]*\)?[^()\n]*)?\Z")
OPEN_TAG = re.compile(r"</?[A-Za-z][^<>]{0,2000}\Z")
SOLID = re.compile(r"[^\s*+•>#_~-]")
"""In front of it in a line there may be marks of lines; behind it no more."""
PLAIN = frozenset(".,;:?…。，！？；：、")
_OPENINGS_TRIED = 3
_LONGEST_SIGNS = 64

MARKS = tuple(
    (frozenset(signs), mark)
    for signs, mark in (
        ("<", HTML_COMMENT),
        ("<", HTML_TAG),
        ("-*_", RULE),
        (">", QUOTE_MARK),
        ("#", HEADING),
        ("-*+•", LIST_MARK),
        ("*~_", EMPHASIS),
    )
)
"""Signs, one of which each match of a mark holds, in the order in which marks are removed."""

STRAIGHT_QUOTES = str.maketrans({"“": '"', "”": '"', "„": '"', "‘": "'", "’": "'", "‚": "'"})
UNSPEAKABLE = re.compile("[\x00-\x08\x0e-\x1f\x7f\ufeff\ud800-\udfff]")
WHITESPACE = re.compile(r"\s+")


def strip_markup(text: str) -> str:
    """Removes what is written but not said: Markdown and emoji; quotes become straight.

    Fenced and inline code, images and HTML tags go; of a link its text stays; headings, list and quote marks, rules
    and emphasis lose their signs. Line breaks stay. (VoxCPM's text normalisation, utils/text_normalize.py, with
    emphasis and quotations added; it does not spell numbers or symbols.)
    """
    # A mark that has none of its signs in the text is not looked for: most texts have none at all.
    if "`" in text:
        text = INLINE_CODE.sub("", FENCED_CODE.sub("", text))
    if "](" in text:
        text = LINK.sub(r"\1", IMAGE.sub("", text))
    present = frozenset(text)
    for signs, mark in MARKS:
        if not signs.isdisjoint(present):
            text = mark.sub("", text)
    return text if text.isascii() else EMOJI.sub("", text).translate(STRAIGHT_QUOTES)


class MarkupStripper:
    """`strip_markup` of a text that arrives in pieces: what comes out, joined, is the same for any cutting.

    What may belong to a mark that is not complete yet is held back, at most `longest` characters of it: of a link
    that is still open then, say, the signs stay. Code is dropped as it comes.
    """

    def __init__(self, longest: int = 4096) -> None:
        self._longest = longest
        self._pending = ""
        self._before = ""
        """What stands for the text in front of the pending one: where there is none, a line begins."""

    def feed(self, text: str) -> str:
        """What is decided now."""
        pending = self._pending = self._without_code(self._pending + text)
        # Candidates: the end, and before each of the last signs that may have opened something.
        openings = [match.start() for match in OPENING.finditer(pending)][-_OPENINGS_TRIED:]
        for stop in (len(pending), *reversed(openings)):
            place = self._place(stop)
            if place and self._is_decided(pending[:place]):
                return self._release(place)
        return self._release(self._place(len(pending)) or len(pending)) if len(pending) > self._longest else ""

    def flush(self) -> str:
        """The rest, as if the text ended here. Feeding may go on with a new text."""
        rest = self._release(len(self._pending))
        self._before = ""
        return rest

    def _without_code(self, text: str) -> str:
        """Of a fence that is still open, only what may be the beginning of its end is needed."""
        begin = _open(FENCED_CODE, text, "```", "```")
        return text if begin is None else text[: begin + 3] + text[max(begin + 3, len(text) - 2) :]

    def _place(self, stop: int) -> int:
        """The last place up to `stop` that no mark can reach over but one that is open; 0 if there is none near it."""
        pending = self._pending
        for place in range(stop, max(0, stop - _LONGEST_SIGNS), -1):
            if _plain(pending[place - 1]) or (place < len(pending) and pending[place].isspace()):
                return place
        return 0

    def _is_decided(self, text: str) -> bool:
        """Whatever follows, the marks in text are what they are now."""
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
    """Where the last match begins, if it has no end: the text ended first."""
    matches = [*mark.finditer(text)]
    if not matches or (matches[-1][0].endswith(end) and len(matches[-1][0]) >= len(begin + end)):
        return None
    return matches[-1].start()


def _plain(character: str) -> bool:
    """No mark has it at either end."""
    return character.isalnum() or character in PLAIN


def clean_text(text: str) -> str:
    """What a talker is given: line breaks and runs of whitespace become one space each, control characters go.

    Spaces at either end stay (one each), as the reference leaves them.
    """
    return WHITESPACE.sub(" ", UNSPEAKABLE.sub("", text))
