"""Removes Markdown, HTML tags and emoji from texts that are to be spoken."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Sequence

INVISIBLE = "[\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069]"
"""Soft hyphens, spaces without width and marks of direction. Joiners (U+200C, U+200D) shape words of some scripts."""
UNSPEAKABLE = re.compile(f"[\x00-\x08\x0e-\x1f\x7f\ufeff\ud800-\udfff]|{INVISIBLE}")
WHITESPACE = re.compile(r"\s+")


def clean_text(text: str) -> str:
    """Text as the model gets it: runs of whitespace become one space, also at the ends, as in the reference
    implementation; control and invisible characters are removed."""
    return WHITESPACE.sub(" ", UNSPEAKABLE.sub("", text))


def speakable(text: str) -> bool:
    """Whether the text has a letter or digit."""
    return any(character.isalnum() for character in text)


# Every pattern takes linear time: quantifiers are bounded or cannot match their own opening character.
FENCED_CODE = re.compile(r"```.*?(?:```|\Z)", re.DOTALL)
INLINE_CODE = re.compile(r"`([^`\n]*)`")
CODE_WORDS, CODE_LENGTH = 5, 80
"""Inline code of up to so many words and characters is spoken."""
LINK_TARGET = r"\([^()\n]{0,2000}(?:\([^()\n]{0,200}\)[^()\n]{0,200})?\)"
IMAGE = re.compile(r"!\[[^\[\]]{0,2000}\]" + LINK_TARGET)
LINK = re.compile(
    rf"\[(?![pP][aA][uU][sS][eE]:[\d.\s]{{1,16}}m?s\s*\])([^\[\]]{{1,2000}})\](?:{LINK_TARGET}"
    r"|(?<=[^\W\d]\])\[[^\[\]\n]{0,200}\](?![\w\[(]))"
)
"""With its target, or with the name of its definition. A pause before a word in parentheses is no link."""
LINK_DEFINITION = re.compile(
    r"^[ \t]{0,3}\[(?!\^)[^\[\]\n]{1,200}\]:[ \t]{0,9}<?(?:[a-z]{2,9}:|[/.#]|www\.)[^\s]{0,2000}"
    r"(?:[ \t]{1,9}[\"'(][^\n]{0,300}[\"')])?[ \t]{0,9}$",
    re.MULTILINE,
)
FOOTNOTE = re.compile(r"^\[\^[^\[\]\s]{1,64}\]:[ \t]?|\[\^[^\[\]\s]{1,64}\]", re.MULTILINE)
MATH = re.compile(
    r"(?<![\w$\\])\$\$?(?=[A-Za-z\\({|-]|\d[\w+*/() -]{0,40}[\\^_=])(?!\w{2,40} )([^$\n]{0,200}[^$\s\\])\$\$?(?![\w$])"
    r"|\\[()\[\]]"
)
"""$x^2$, or a delimiter of LaTeX."""
COMMAND = re.compile(r"\\frac\{([^{}]{1,99})\}\{([^{}]{1,99})\}|\\([A-Za-z]{1,20})")

BLOCKS = "address|article|blockquote|br|dd|div|dl|dt|h[1-6]|hr|li|ol|p|section|table|td|th|tr|ul"
ELEMENTS = (
    "abbr|acronym|aside|b|bdi|bdo|big|body|button|caption|center|cite|code|colgroup|del|details|dfn|em|fieldset|"
    "figcaption|figure|font|footer|form|head|header|html|i|iframe|img|ins|kbd|legend|main|mark|nav|option|pre|q|"
    "rp|rt|ruby|s|samp|script|select|small|span|strike|strong|style|sub|summary|sup|svg|tbody|textarea|tfoot|thead|"
    "tt|u|var|wbr|speak|voice|break|prosody|emphasis|say-as|phoneme|think"
)
"""Of HTML and SSML. Others, such as <title> and <time>, are tags only with attributes or where they end something: by
themselves they may be placeholders."""
ATTRIBUTE = (
    r"\s{1,9}(?:[\w:@.-]{1,40}\s{0,3}=\s{0,3}(?:\"[^\"<>]{0,1000}\"|'[^'<>]{0,1000}'|[^\s\"'<>=]{1,500})"
    r"|(?:async|autoplay|checked|controls|defer|disabled|hidden|loop|muted|open|readonly|required|reversed|selected)\b)"
)
HTML_TAG = re.compile(
    r"<(https?://[^\s<>]{1,2000}|[A-Za-z][^\s<>@/]{0,63}@[^\s<>@/]{1,255})>"
    rf"|(?<=\S)(?P<block></?(?i:{BLOCKS})(?:{ATTRIBUTE}){{0,20}}\s{{0,9}}/?>)(?=\S)"
    rf"|<(?:/[A-Za-z][\w:-]{{0,30}}|(?i:{BLOCKS}|{ELEMENTS}))\s{{0,9}}/?>"
    rf"|<[A-Za-z][\w:-]{{0,30}}(?:(?:{ATTRIBUTE}){{1,20}}\s{{0,9}}/?|\s{{0,9}}/)>"
)
"""Or an address, group 1: <https://example.com>. block: between two words."""
PLACEHOLDER = re.compile(r"(?<=\w)<([A-Za-z_][^<>\n]{0,60})>(?!\w)|(?<![A-Za-z0-9_])<([^\W\d][^<>\n]{0,60})>")
"""List<String>, Dear <NAME>: only the brackets go. "x<y then y>x" has none."""
HTML_COMMENT = re.compile(r"<!--.*?(?:-->|\Z)", re.DOTALL)
ENTITY = re.compile(r"&(?:#\d{1,7}|#[xX][\da-fA-F]{1,6}|[A-Za-z][A-Za-z\d]{1,30});")
HEADING = re.compile(r"^[ \t]{0,3}#{1,6}[ \t]+", re.MULTILINE)
TASK = re.compile(r"^([ \t]{0,16}(?:[-*+•]|\d{1,3}[.)])[ \t]+)\[[ xX]\](?=\s|\Z)[ \t]?", re.MULTILINE)
LIST_MARK = re.compile(r"^[ \t]{0,16}[-*+•][ \t]+", re.MULTILINE)
NUMBERED = re.compile(r"^([ \t]{0,16}\d{1,3})\)(?=\s)", re.MULTILINE)
QUOTE_MARK = re.compile(r"^[ \t]{0,3}>(?![\d$=])[ \t]?", re.MULTILINE)
RULE = re.compile(r"^[ \t]{0,3}([-*_=])[ \t]{0,3}\1[ \t]{0,3}(?:\1[ \t]{0,3})+$|={4,}", re.MULTILINE)
TABLE_RULE = re.compile(r"^(?=[^\n]{0,200}\|)[ \t]{0,3}[|:-](?:[|: \t-]{0,400}-)[|: \t]{0,9}$", re.MULTILINE)
TABLE_ROW = re.compile(r"^[ \t]{0,3}\|([^\n]{1,4000})$|[ \t]{1,40}\|(?=[ \t])", re.MULTILINE)
EMPHASIS = re.compile(
    r"(?<![\d\\])\*\*\*?|(?<=\d)\*\*\*?(?!\d)|~~|(?<![=\w])==(?=\w)|(?<=\w)==(?![=\w])|"
    r"(?<![^\W_])(?<!\\)__?(?=[^\W_])|(?<=[^\W_])__?(?![^\W_])|(?<![\w*\\])\*(?=\w)|(?<=[^\W\d])\*(?!\w)"
)
"""2**3 is a power."""
ESCAPE = re.compile(r"\\([!-/:-@\[-`{-~])")

_PICTURE = (
    "[\U0001f000-\U0001faff\u2600-\u27bf\u231a\u231b\u2328\u23cf\u23e9-\u23fa\u25fb-\u25fe\u2b05-\u2b07\u2b1b\u2b1c"
    "\u2b50\u2b55\u3030\u303d]"
)
_MODIFIER = "[\ufe0f\u20e3\U0001f3fb-\U0001f3ff\U000e0020-\U000e007f]"
# A zero-width joiner is removed only between two emoji; Indic scripts and Persian need theirs.
EMOJI = re.compile(
    f"{_PICTURE}{_MODIFIER}*(?:\u200d{_PICTURE}{_MODIFIER}*)*|{_MODIFIER}|{INVISIBLE}"
    "|[\u2500-\u257f]+"  # lines of boxes
)

# How a chunk of text may end inside a mark, once the complete marks are removed.
OPENING = re.compile(r"[`<\[$&|]")
OPEN_CODE = re.compile(r"`[^`\n]*\Z")
OPEN_TARGET = re.compile(r"\]\([^()\n]*(?:\([^()\n]*\)?[^()\n]*)?\Z")
OPEN_TAG = re.compile(r"<(?:(?:/|[^\W\d])[^<>]{0,63}|[A-Za-z][\w:-]{0,30}\s[^<>=]{1,60}=[^<>]{0,2000})?\Z")
OPEN_MATH = re.compile(r"(?<![\w$\\])\$\$?(?:(?=[A-Za-z\\({|-]|\d[\w+*/() -]{0,40}[\\^_=])[^$\n]{0,200})?\Z|\\\Z")
OPEN_ENTITY = re.compile(r"&[#\w]{0,31}\Z")
OPEN_LINE = re.compile(r"^[ \t]{0,3}(?:\||\[[^\[\]\n]{1,200}\]:)[^\n]{0,4000}\Z|[ \t|]\Z", re.MULTILINE)
"""A row of a table or the definition of a link, until its line ends."""
SOLID = re.compile(r"[^\s\d*+•>#_~=|:.)\[-]")
"""Marks at the beginning of a line (headings, lists, ...) can only stand before the first such character."""
PLAIN = frozenset(".,;:?…。，！？；：、")
_OPENINGS_TRIED = 3
_LONGEST_SIGNS = 64


def _in_place_of(tag: re.Match[str]) -> str:
    """The address in a tag; a space where the words around it would become one."""
    return tag[1] or (" " if tag["block"] else "")


def _kept_code(code: re.Match[str]) -> str:
    """The words of short inline code, without what would be read as a mark."""
    words = code[1].split()
    if len(words) > CODE_WORDS or len(code[1]) > CODE_LENGTH:
        return ""
    return " ".join(re.sub(r"</?(?=\w)|(?<=[\w\"'/])/?>|[*|\[\]$\\]", "", word) for word in words)


def _math(match: re.Match[str]) -> str:
    """A formula with its commands as words."""
    words = COMMAND.sub(lambda part: f"{part[3]} " if part[3] else f"{part[1]} over {part[2]}", match[1] or "")
    return words.replace("{", "").replace("}", "").strip()


def _row(match: re.Match[str]) -> str:
    """Cells with commas between them. A bar within a line: a comma."""
    if match[1] is None:
        return ","
    cells = [cell.strip() for cell in match[1].split("|")]
    row = ", ".join(cell for cell in cells if cell)
    return row + "." if row and row[-1].isalnum() else row


Mark = tuple[frozenset[str], re.Pattern[str], str | Callable[[re.Match[str]], str]]
MARKS: tuple[Mark, ...] = tuple(
    (frozenset(signs), mark, instead)
    for signs, mark, instead in (
        ("<", HTML_COMMENT, ""),
        ("<", HTML_TAG, _in_place_of),
        ("<", PLACEHOLDER, lambda match: f" {match[1]}" if match[1] else match[2]),
        ("[", LINK_DEFINITION, ""),
        ("[", FOOTNOTE, ""),
        ("[", TASK, r"\1"),
        ("$\\", MATH, _math),
        ("|", TABLE_RULE, ""),
        ("|", TABLE_ROW, _row),
        ("-*_=", RULE, ""),
        (">", QUOTE_MARK, ""),
        ("#", HEADING, ""),
        ("-*+•", LIST_MARK, ""),
        (")", NUMBERED, r"\1."),
        ("*~_=", EMPHASIS, ""),
        ("\\", ESCAPE, r"\1"),
        ("&", ENTITY, lambda match: html.unescape(match[0]).replace("\xa0", " ")),
    )
)
"""(characters, mark, what stands in its place): each match has one of the characters. In the order in which marks are
removed."""

STRAIGHT_QUOTES = str.maketrans({"“": '"', "”": '"', "„": '"', "‘": "'", "’": "'", "‚": "'"})


_WITHIN_LINES = 7
"""Of MARKS, those of which something is left for the marks at the begin of a line."""


def _without(marks: Sequence[Mark], text: str) -> str:
    """Patterns whose characters do not occur are skipped: most texts have no marks at all."""
    present = frozenset(text)
    for signs, mark, instead in marks:
        if not signs.isdisjoint(present):
            text = mark.sub(instead, text)
    return text


def strip_markup(text: str) -> str:
    """The text without Markdown, HTML tags and emoji, and with straight quotes (VoxCPM's utils/text_normalize.py, with
    more marks). Code that is fenced or long, images and definitions go as a whole; the text of links and short code,
    addresses and placeholders in angle brackets, and all line breaks stay."""
    if "`" in text:
        text = INLINE_CODE.sub(_kept_code, FENCED_CODE.sub("", text))
    if "](" in text or "][" in text:
        text = LINK.sub(r"\1", IMAGE.sub("", text))
    text = _without(MARKS, text)
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

    def feed(self, text: str, *, final: bool = False) -> str:
        """Return the text that later chunks cannot change. final: the text ends here, and a new one may follow."""
        if final:
            self._pending += text
            rest = self._release(len(self._pending))
            self._before = ""
            return rest
        pending = self._pending = self._without_code(self._pending + text)
        # Candidates: the end, and before each of the last characters that may have opened a mark.
        openings = [match.start() for match in OPENING.finditer(pending)][-_OPENINGS_TRIED:]
        for stop in (len(pending), *reversed(openings)):
            place = self._place(stop)
            if place and self._is_decided(pending[:place]):
                return self._release(place)
        return self._release(self._place(len(pending)) or len(pending)) if len(pending) > self._longest else ""

    def _without_code(self, text: str) -> str:
        """Drop the content of an open code fence, except for what may be the beginning of its end."""
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
        text = INLINE_CODE.sub(_kept_code, FENCED_CODE.sub("", text))
        if OPEN_CODE.search(text):  # before links: the code may end behind one and take its target along
            return False
        text = LINK.sub(r"\1", IMAGE.sub("", text))
        if text.rfind("[") > text.rfind("]") or OPEN_TARGET.search(text):
            return False
        if _open(HTML_COMMENT, text, "<!--", "-->") is not None:
            return False
        if OPEN_LINE.search(text) or OPEN_MATH.search(text):
            return False
        text = _without(MARKS[:_WITHIN_LINES], text)
        if any(mark.search(text) for mark in (OPEN_TAG, OPEN_MATH, OPEN_ENTITY, OPEN_LINE)):
            return False
        text = _without(MARKS[_WITHIN_LINES:], text)
        return SOLID.search(text, text.rfind("\n") + 1) is not None

    def _release(self, place: int) -> str:
        text, self._pending = self._pending[:place], self._pending[place:]
        stripped = strip_markup(self._before + text)[len(self._before) :]
        if text:
            self._before = "x" + text[-1] * _plain(text[-1])  # "x": a digit alone would begin a numbered line
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
