"""What is written with dots and other signs instead of spaces, in English: addresses, files, versions, handles.

Queries of addresses are left out: nobody can follow them by ear.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from service.api.spoken_text.normalising.numbers import cardinal, digits

Rule = tuple[re.Pattern[str], Callable[[re.Match[str]], str]]

LABEL = r"[A-Za-z0-9][A-Za-z0-9-]{0,62}"
DOMAINS = "com|org|net|io|ai|dev|edu|gov|info|app|uk|de|fr|eu|jp|cn|ch"
ENDING = ".,;:!?)"
FILES = (
    "txt|md|py|js|ts|json|csv|tsv|pdf|html|css|yaml|yml|toml|xml|sh|zip|gz|png|jpg|jpeg|gif|svg|mp3|mp4|wav|"
    "docx?|xlsx?|pptx?|exe|log|cfg|ini|cpp|rs|go|java|ipynb"
)
SIGNS = {
    ".": "dot",
    "@": "at",
    "-": "dash",
    "_": "underscore",
    "/": "slash",
    "+": "plus",
    ":": "colon",
    "~": "tilde",
    "%": "percent",
    "=": "equals",
}
SIGN = re.compile(r"[.@_/+:~%=-]")
PRODUCTS = r"[Vv]ersion|Python|iOS|iPadOS|macOS|Android|Ubuntu|Debian|CUDA|PyTorch|Java|Node|Windows|Linux"


def _spelled(text: str) -> str:
    """a.b@c -> a dot b at c. Numbers stay, for the rules after this one."""
    return " ".join(SIGN.sub(lambda sign: f" {SIGNS[sign[0]]} ", text).split())


def _url(match: re.Match[str]) -> str:
    """Host and path of the address as words, then the signs behind it that belong to the sentence."""
    address = (match["host"] or match["domain"]) + match["path"]
    whole = match["query"] or address
    return _spelled(address.rstrip(ENDING).rstrip("/")) + whole[len(whole.rstrip(ENDING)) :]


def _dotted(match: re.Match[str]) -> str:
    """4.2.1 -> four point two point one, 192.168.0.1 -> ... dot ..."""
    parts = match["parts"].split(".")
    if len(parts) == 3 and all(len(part) == 3 for part in parts[1:]):
        return match[0]  # 1.000.000: thousands
    between = " dot " if len(parts) == 4 and all(int(part) < 256 for part in parts) else " point "
    spoken = between.join(cardinal(int(part)) for part in parts)
    if match["mask"]:
        spoken += f" slash {cardinal(int(match['mask']))}"
    if match["port"]:
        spoken += f" port {digits(match['port'])}"
    return match["before"] + spoken + (" plus" if match["more"] else "")


ADDRESSES: tuple[Rule, ...] = tuple(
    (re.compile(pattern), replace)
    for pattern, replace in (
        (
            rf"(?<![\w@./:-])(?:(?:https?://(?:www\.)?|www\.)(?P<host>{LABEL}(?:\.{LABEL}){{0,8}})"
            rf"|(?P<domain>(?:{LABEL}\.){{1,4}}(?:{DOMAINS})))(?::\d{{1,5}})?"
            r"(?P<path>(?:/[\w.~%+=:,;!-]{0,100}){0,12})(?P<query>[?#][^\s\"'<>]{1,2000})?(?![\w@-])",
            _url,
        ),
        (
            rf"(?<![\w@.+-])[\w.+-]{{1,64}}@{LABEL}(?:\.{LABEL}){{1,8}}(?![\w@-])",
            lambda match: _spelled(match[0]),
        ),
        (rf"(?<![\w@./:-])[\w-]{{1,60}}\.(?:{FILES})(?![\w/-]|\.\w)", lambda match: _spelled(match[0])),
        (
            r"(?<![\w.,:/@#$€£¥&=+%~^*\\-])(?P<before>)(?P<parts>\d{1,3}(?:\.\d{1,3}){2,3})"
            r"(?:/(?P<mask>\d\d?))?(?::(?P<port>\d{2,5}))?(?P<more>)(?![\w/@=-]|[.:]\d)",
            _dotted,
        ),
        (
            rf"\b(?P<before>(?:{PRODUCTS}) )(?P<parts>\d{{1,3}}(?:\.\d{{1,3}}){{1,3}})(?P<mask>)(?P<port>)(?P<more>\+?)"
            r"(?![\w/@=-]|\.\d)",
            _dotted,
        ),
        (r"(?<![\w&#/])#(?=[A-Za-z])", lambda match: "hashtag "),
        (r"(?<![\w@./])@(?=[A-Za-z_])", lambda match: "at "),
    )
)
