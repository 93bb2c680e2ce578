"""Types of settings: how they are written in variables, flags and files, and what they allow."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr
from pydantic_settings import NoDecode

from service.byte_sizes import parse_bytes


def _words(value: Any) -> Any:
    return tuple(value.split()) if isinstance(value, str) else value


def _distinct(values: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(values))


def _bytes(value: Any) -> Any:
    """Plain numbers stay."""
    return parse_bytes(value) if isinstance(value, str) else value


Words = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_words)]
Integers = Annotated[tuple[Annotated[int, Field(ge=1)], ...], NoDecode, BeforeValidator(_words)]
SolverSteps = Annotated[
    tuple[Annotated[int, Field(ge=4, le=32)], ...],
    NoDecode,
    BeforeValidator(_words),
    Field(max_length=8),
    AfterValidator(_distinct),
]
Secrets = Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_words)]
BYTES = BeforeValidator(_bytes)
"""Marks settings that are a number of bytes."""
Bytes = Annotated[int, BYTES, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, le=1)]
