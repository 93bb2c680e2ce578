"""Pictures, videos and prompts of Qwen2.5-VL: those of Qwen2-VL, with time in the positions of videos. Torch-free."""

from __future__ import annotations

from pathlib import Path

from models.qwen_vl.processor import Qwen2VLProcessor
from models.qwen_vl.v2_5.config import load_config
from models.text.processor import load_text


def load_processor(directory: Path) -> Qwen2VLProcessor:
    """Reads the files that Qwen2-VL's processor reads."""
    return Qwen2VLProcessor(load_config(directory).shared, *load_text(directory))
