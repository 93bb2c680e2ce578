"""`reprise serve` whose transcripts have the tokens of speech: random weights would go on to the model's limit.

python -m benchmarks.servers.short_transcripts serve [server flags]
"""

from __future__ import annotations

import runpy
import sys
from unittest.mock import patch

from models.interfaces.media import MediaItem
from models.qwen3_asr.config import SAMPLE_RATE
from models.qwen3_asr.processor import Qwen3ASRProcessor
from service.processes import supervisor

PROGRAM = ("benchmarks.servers.short_transcripts", "serve")


def tokens_of(self: Qwen3ASRProcessor, item: MediaItem) -> int:
    """Three that name the language, and those of two and a half words a second."""
    return round(3 + 3.25 * len(item.arrays["samples"]) / SAMPLE_RATE)


if __name__ == "__main__":
    name = "service.cli" if sys.argv[1] == "serve" else sys.argv.pop(1)  # of an API process
    with (
        patch.object(Qwen3ASRProcessor, "max_new_tokens", tokens_of),
        patch.object(supervisor, "python_command", lambda module: [sys.executable, "-m", PROGRAM[0], module]),
    ):
        runpy.run_module(name, run_name="__main__", alter_sys=True)
