"""YAML in which no key is there twice: of its values PyYAML takes the last one, without a word."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import yaml

_KEPT = ("tag:yaml.org,2002:null", "tag:yaml.org,2002:merge")
"""Tags of plain scalars that are no values: nothing, and `<<`."""


class DuplicateKey(ValueError):
    """The message names the key and both lines."""


class _Loader(yaml.SafeLoader):
    def __init__(self, text: str, meaning: Callable[[object], str], as_written: bool) -> None:
        super().__init__(text)
        self._meaning, self._as_written = meaning, as_written

    def resolve(self, kind: Any, value: Any, implicit: Any) -> Any:
        tag = super().resolve(kind, value, implicit)
        is_value = kind is yaml.ScalarNode and tag not in _KEPT
        return self.DEFAULT_SCALAR_TAG if is_value and self._as_written else tag

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        written = list(node.value)  # without what `<<` merges, which the next line adds
        values = super().construct_mapping(node, deep)
        lines: dict[str, int] = {}
        for key, _ in written:
            name, line = self._meaning(key.value), key.start_mark.line + 1
            if name in lines:
                raise DuplicateKey(f"{name} is set in line {lines[name]} and again in line {line}")
            lines[name] = line
        return values


def load_yaml(text: str, meaning: Callable[[object], str] = str, *, as_written: bool = False) -> Any:
    """What a YAML text holds. meaning: what a key stands for, if it has several spellings. as_written: numbers,
    booleans and dates stay texts; only null is None. Raises DuplicateKey, and what yaml.safe_load raises."""
    loader = _Loader(text, meaning, as_written)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()
