"""Errors of the model layer. Each message names the thing: which tensor, which field, what was expected."""

from __future__ import annotations


class InputError(ValueError):
    """Client input that the model cannot take. `field` names the request field."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class PromptTooLong(InputError):
    """A prompt that leaves no room in the model's context for an answer."""


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded as it is: names the file and the tensor or setting."""
