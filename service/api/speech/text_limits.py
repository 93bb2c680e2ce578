"""How long a text to speak may be."""

from __future__ import annotations

from models.interfaces.errors import InputError
from service.api.context import ServerContext

MAX_WHOLE_CHARS = 4096
"""Limit in characters of a text that is answered with a complete file. Longer texts must be streamed, since such a file
is held in memory."""
SPOKEN_GROWTH = 2
"""How many times its limit a text may have once its numbers have become words."""
MAX_WORDED_CHARS = SPOKEN_GROWTH * MAX_WHOLE_CHARS
"""MAX_WHOLE_CHARS once numbers have become words."""


class SpokenTooLong(InputError):
    """The text is within its limit, but the words that are spoken for it are not."""


def max_written_chars(context: ServerContext, *, live: bool) -> int:
    """Limit in characters of a text to speak. live: the audio is streamed."""
    most = context.settings.max_speech_chars
    return most if live else min(most, MAX_WHOLE_CHARS)


def max_spoken_chars(context: ServerContext, *, live: bool) -> int:
    """Limit in characters of a text as it is spoken."""
    return SPOKEN_GROWTH * max_written_chars(context, live=live)
