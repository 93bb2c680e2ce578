"""Tables of words, parts of patterns, and rules, from the files of this folder.

A file has sections, [NAME], of lines with cells between tabs. A rule is a pattern and what stands for its match: a
template, in double quotes where it has spaces at its ends, or =function. {NAME} in a pattern is a part of [PATTERNS],
or the alternatives of a table. {group} in a template is a group of the match, {group:filter} what a filter makes of it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from importlib.resources import files

Filter = Callable[[str], str]
Replacement = Callable[[re.Match[str]], str]
Rule = tuple[re.Pattern[str], Replacement]

SECTION = re.compile(r"\[([A-Z_ ]+)\]")
NAME = re.compile(r"\{([A-Z][A-Z_0-9]*)\}")


def alternatives(words: Iterable[str]) -> str:
    """A pattern for any of the words, the longest first."""
    return "|".join(map(re.escape, sorted(words, key=len, reverse=True)))


class Tables:
    """One of the files."""

    def __init__(self, name: str) -> None:
        self._sections: dict[str, list[list[str]]] = {}
        rows: list[list[str]] = []
        for line in (files(__package__) / name).read_text("utf-8").splitlines():
            if (section := SECTION.fullmatch(line)) is not None:
                rows = self._sections[section[1]] = []
            elif line and not line.startswith("# "):
                rows.append(line.split("\t"))
        self._parts = {name: alternatives(row[0] for row in rows) for name, rows in self._sections.items()}
        for part, pattern in self._sections.get("PATTERNS", []):
            self._parts[part] = self.pattern(pattern)

    def words(self, section: str) -> tuple[str, ...]:
        """The first cell of each line."""
        return tuple(row[0] for row in self._sections[section])

    def table(self, section: str) -> dict[str, str]:
        """The second cell of each line by the first."""
        return {row[0]: row[1] for row in self._sections[section]}

    def sets(self, section: str) -> dict[str, frozenset[str]]:
        """The words of the second cell of each line by the first."""
        return {name: frozenset(words.split()) for name, words in self.table(section).items()}

    def forms(self, section: str) -> dict[str, list[str]]:
        """The other cells of each line by the first."""
        return {row[0]: row[1:] for row in self._sections[section]}

    def pattern(self, pattern: str) -> str:
        """The pattern with its parts in place of their names."""
        return NAME.sub(lambda name: self._parts[name[1]], pattern)

    def rules(self, functions: Mapping[str, Replacement], filters: Mapping[str, Filter]) -> tuple[Rule, ...]:
        """The rules, in the order in which they are applied. KeyError for an unknown name."""
        return tuple(
            (
                re.compile(self.pattern(pattern)),
                functions[said[1:]] if said.startswith("=") else _template(said.strip('"'), filters),
            )
            for pattern, said in self._sections["RULES"]
        )


def _template(template: str, filters: Mapping[str, Filter]) -> Replacement:
    parts = [part.partition(":") for part in re.split(r"\{(.*?)\}", template)]
    groups = [int(name) if name.isdigit() else name for name, _, _ in parts[1::2]]
    steps = [filters[step] if step else str for _, _, step in parts[1::2]]
    between = [text + colon + rest for text, colon, rest in parts[::2]]

    def replace(match: re.Match[str]) -> str:
        said = [step(match[group] or "") for step, group in zip(steps, groups, strict=True)]
        return "".join(text for pair in zip(between, [*said, ""], strict=True) for text in pair)

    return replace
