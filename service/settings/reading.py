"""How settings are written in variables, flags and files, what their types allow, and messages about what cannot be
used."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_origin

import yaml
from pydantic import AfterValidator, BeforeValidator, Field, SecretStr
from pydantic.fields import FieldInfo
from pydantic_settings import EnvSettingsSource, NoDecode

_NULL = "tag:yaml.org,2002:null"


class TextLoader(yaml.SafeLoader):
    """Reads numbers, booleans and dates as texts: YAML would make a boolean of `page: off`, and 8 of 010."""

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag == _NULL]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_SUBJECT = re.compile(r"^\w+ should ")
"""How pydantic begins: "Input should be", "Tuple should have"."""
_PATH = re.compile(r"^Input is not a valid path\b.*")
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


def read_file(path: Path) -> dict[str, Any]:
    """The settings in a YAML file, by name. Values are texts, as those of flags and variables are. SettingsError for a
    file that cannot be read, or is none."""
    try:
        values = yaml.load(path.read_text("utf-8"), TextLoader) or {}
    except OSError as error:
        raise SettingsError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, yaml.YAMLError, RecursionError) as error:  # as of a date in month 13
        raise SettingsError(f"{path}: not a YAML file ({yaml_problem(error)})") from error
    if not isinstance(values, dict):
        raise SettingsError(f"{path}: expected a mapping of settings, got {type(values).__name__}")
    return {str(key).replace("-", "_"): value for key, value in values.items()}  # as a flag or as a variable


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


MIB = 1 << 20
GIB = 1 << 30
MOST = (1 << 63) - 1
UNITS = {"": 1, "K": 1 << 10, "M": MIB, "G": GIB}


def parse_bytes(value: str) -> int:
    """ "512M" -> 536870912. ValueError for any other text, and for more than MOST."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", value.strip(), re.I)
    if match is None:
        raise ValueError("must be a number of bytes, such as 1048576, 512M or 4G")
    size = float(match[1]) * UNITS[match[2].upper()]
    if size > MOST:
        raise ValueError(f"must be at most {MOST} bytes")
    return int(size)


def _several(value: Any) -> Any:
    """One value stands for a list of one; it may hold blanks. Only variables are split at blanks."""
    return (value,) if isinstance(value, str | int | float) else value


def _distinct(values: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(values))


def _bytes(value: Any) -> Any:
    """Plain numbers stay."""
    return parse_bytes(value) if isinstance(value, str) else value


_ONE_GPU = re.compile(r"\d+|(GPU|MIG)-[0-9A-Za-z/-]+")


def _gpus(value: Any) -> str:
    """How many ("4"), "all", or a list ("0,2"), which a YAML file may write as one."""
    text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value).strip()
    named = [name for part in text.split(",") if (name := part.strip())]
    if text == "all" or (text.isdecimal() and int(text) > 0 and not isinstance(value, list | tuple)):
        return text
    if text.isdecimal() and not isinstance(value, list | tuple):
        raise ValueError("must be at least 1; without it one engine runs, on a GPU or with --device cpu on the CPU")
    if not named or not all(map(_ONE_GPU.fullmatch, named)):
        raise ValueError("must be a number of GPUs, all, or a list of their indexes or UUIDs as in 0,2")
    if len(set(named)) < len(named):
        raise ValueError("names a GPU twice; each has one engine")
    return ",".join(named) if len(named) > 1 else f"{named[0]},"


_ORIGIN = re.compile(r"\*|null|[a-z][a-z0-9+.-]*://[^/?#\s]*")


def _origin(value: str) -> str:
    """As browsers send it; another spelling would silently match no page."""
    if not _ORIGIN.fullmatch(value):
        raise ValueError("must be an origin such as https://app.example:3000, without a path, or *")
    return value


MAX_API_PROCESSES = 64


def _api_processes(value: Any) -> int | str:
    text = str(value).strip()
    if text == "auto":
        return text
    if not text.isdecimal() or not 1 <= int(text) <= MAX_API_PROCESSES:
        raise ValueError(f"must be auto, or a number from 1 to {MAX_API_PROCESSES}")
    return int(text)


_HOST = re.compile(r"[^\s\[\]/\0\"']+")
"""Not the forms of URLs, nor the path of a socket, nor what an --env-file of Docker has in quotation marks."""


def _host(value: str) -> str:
    """What can be bound. Without this check the refusals would be about keys, or a traceback."""
    try:
        possible = bool(_HOST.fullmatch(value)) and (":" in value or bool(value.encode("idna")))
    except UnicodeError:
        possible = False
    if not possible or value.startswith("unix:"):
        raise ValueError("must be an IP address without brackets, such as ::1, or a host name")
    return value


def _location(value: Any) -> Any:
    """A path that is empty, as of a variable that a script forgot to set, would be the working directory."""
    if value == "":
        raise ValueError("must not be empty; leave it out for the default")
    return value


ApiCount = Annotated[int | Literal["auto"], BeforeValidator(_api_processes)]
Words = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_several)]
Host = Annotated[str, AfterValidator(_host)]
Location = Annotated[Path, BeforeValidator(_location)]
"""A file or a directory."""
Origins = Annotated[tuple[Annotated[str, AfterValidator(_origin)], ...], NoDecode, BeforeValidator(_several)]
Steps = Annotated[
    tuple[Annotated[int, Field(ge=4, le=32)], ...],
    NoDecode,
    BeforeValidator(_several),
    Field(max_length=8),
    AfterValidator(_distinct),
]
Secrets = Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_several)]
BYTES = BeforeValidator(_bytes)
"""Marks settings that are a number of bytes."""
Bytes = Annotated[int, BYTES, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Pause = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Workers = Annotated[int, Field(ge=1, le=1024)]
"""Threads or processes."""
Slots = Annotated[int, Field(ge=1, le=16384)]
"""More would not fit into the memory of any machine, or take minutes to allocate."""
Gpus = Annotated[str, BeforeValidator(_gpus)]
