"""Pictures, videos and prompts of Qwen3.5: Qwen3-VL's. Torch-free."""

from __future__ import annotations

from pathlib import Path

from models.qwen_vl.v3.processor import Qwen3VLProcessor, processor_of
from models.qwen_vl.v3_5.config import load_config


def load_processor(directory: Path) -> Qwen3VLProcessor:
    """Reads the files that Qwen3-VL's processor reads."""
    return processor_of(directory, load_config(directory))
