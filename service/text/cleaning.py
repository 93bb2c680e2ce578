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

STRAIGHT_QUOTES = str.maketrans({"“": '"', "”": '"', "„": '"', "‘": "'", "’": "'", "‚": "'"})
UNSPEAKABLE = re.compile("[\x00-\x08\x0e-\x1f\x7f\ufeff\ud800-\udfff]")
WHITESPACE = re.compile(r"\s+")


def strip_markup(text: str) -> str:
    """Removes what is written but not said: Markdown and emoji; quotes become straight.

    Fenced and inline code, images and HTML tags go; of a link its text stays; headings, list and quote marks, rules
    and emphasis lose their signs. Line breaks stay. (VoxCPM's text normalisation, utils/text_normalize.py, with
    emphasis and quotations added; it does not spell numbers or symbols.)
    """
    text = FENCED_CODE.sub("", text)
    text = INLINE_CODE.sub("", text)
    text = IMAGE.sub("", text)
    text = LINK.sub(r"\1", text)
    for mark in (HTML_COMMENT, HTML_TAG, RULE, QUOTE_MARK, HEADING, LIST_MARK, EMPHASIS):
        text = mark.sub("", text)
    return EMOJI.sub("", text).translate(STRAIGHT_QUOTES)


def clean_text(text: str, *, markup: bool) -> str:
    """What a talker is given: line breaks and runs of whitespace become one space each, control characters go.

    Spaces at either end stay (one each), as the reference leaves them. markup: also `strip_markup`, for text written
    by a chat model.
    """
    if markup:
        text = strip_markup(text)
    return WHITESPACE.sub(" ", UNSPEAKABLE.sub("", text))
