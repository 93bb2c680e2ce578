"""How variables become settings, and messages about what cannot be used."""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any, get_origin

import yaml
from pydantic.fields import FieldInfo
from pydantic_settings import EnvSettingsSource

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


_SUBJECT = re.compile(r"^\w+ should ")
"""How pydantic begins: "Input should be", "Tuple should have"."""
_PATH = re.compile(r"^Input is not a valid path\b.*")
_NO_TEXT = re.compile(r"[\0\ud800-\udfff]")
"""NUL, and what Python has in place of bytes that are not of the locale's encoding."""
_REASON = re.compile(r", (unable to|got) .*$| after validation\b")


class SettingsError(ValueError):
    """Invalid settings; the message names each key."""


class Variables(EnvSettingsSource):
    """The variables of the environment, where the values of a list are separated by spaces."""

    def prepare_field_value(self, field_name: str, field: FieldInfo, value: Any, value_is_complex: bool) -> Any:
        if isinstance(value, str) and get_origin(field.annotation) is tuple:
            return tuple(value.split())
        return super().prepare_field_value(field_name, field, value, value_is_complex)


def explain(problem: Any) -> str:
    """A problem that pydantic found, in one line. Of a list the value that does not fit is shown, not its place."""
    where, value = str(next(iter(problem["loc"]), "")), problem["input"]
    message = problem["msg"].removeprefix("Value error, ")
    message = _REASON.sub("", _PATH.sub("must be a path", _SUBJECT.sub("must ", message))).replace(
        "a valid tuple", "a list"
    )
    shown = isinstance(value, str | int | float) and where != "api_key"
    given = " (nothing given)" if value is None else f" ({value!r:.80} given)" if shown else ""
    return f"{where}: {message}{given}" if where else message


def value_problem(values: Iterable[tuple[str, Any]]) -> str:
    """The first setting that no child process could be told, since its value has bytes that are no text, or a NUL, or
    with a path in a home that cannot be found: without HOME, a user has one only by name. Empty if there is none."""
    for name, value in values:
        if any(_NO_TEXT.search(str(part)) for part in (value if isinstance(value, tuple) else (value,))):
            return f"{name}: has bytes that are not {sys.getfilesystemencoding()}, or a NUL"
        if isinstance(value, Path) and os.path.expanduser(value).startswith("~"):
            return f"{name}: no home is known for {value}; set HOME, or name another path"
    return ""


def read_file(path: Path) -> dict[str, Any]:
    """The settings in a YAML file, by name. Values are texts, as those of flags and variables are: YAML would make a
    boolean of `page: off`, and 8 of 010. SettingsError for a file that cannot be read, is none, or names a setting
    twice."""
    try:
        values = load_yaml(path.read_text("utf-8"), _name, as_written=True) or {}
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read ({error.strerror})") from error
    except DuplicateKey as error:
        raise SettingsError(f"{path}: {error}") from None
    except (ValueError, yaml.YAMLError, RecursionError) as error:  # as of a date in month 13
        raise SettingsError(f"{path}: not a YAML file ({yaml_problem(error)})") from error
    if not isinstance(values, dict):
        raise SettingsError(f"{path}: expected a mapping of settings, got {type(values).__name__}")
    return {_name(key): value for key, value in values.items()}


def _name(key: object) -> str:
    """The setting that a key of the file means, which may be written as a flag."""
    return str(key).replace("-", "_")


def yaml_problem(error: Exception) -> str:
    """What a parser says about a file, in one line with the place, if it has one."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or not problem:
        return " ".join(str(error).split())
    context = f"{found}: " if (found := getattr(error, "context", None)) else ""
    return f"{context}{problem}, line {mark.line + 1}, column {mark.column + 1}"


def suggestion(key: str, names: Iterable[str], prefix: str = "") -> str:
    """The name that may have been meant, in words; "" if none is close."""
    close = difflib.get_close_matches(key, list(names), n=1)
    return f" (did you mean {prefix}{close[0].upper() if prefix else close[0]}?)" if close else ""
