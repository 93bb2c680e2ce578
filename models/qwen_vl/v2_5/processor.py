"""Pictures, videos and prompts of Qwen2.5-VL: those of Qwen2-VL, with time in the positions of videos. Torch-free."""

from __future__ import annotations

from pathlib import Path

from models.qwen_vl.pictures import VideoLimits
from models.qwen_vl.processor import Qwen2VLProcessor, processor_of
from models.qwen_vl.v2_5.config import load_config


def load_processor(directory: Path, *, video_limits: VideoLimits | None = None) -> Qwen2VLProcessor:
    """Reads config.json, preprocessor_config.json, generation_config.json, tokenizer.json and the chat template.

    video_limits: pixels of video frames; None for the rule of qwen-vl-utils within the checkpoint's limits.
    """
    config = load_config(directory)
    return processor_of(directory, config.shared, video_limits, tokens_per_second=config.tokens_per_second)
