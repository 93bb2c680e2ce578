"""Pictures, videos and prompts of Qwen2-VL. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from models.interfaces.errors import PromptTooLong
from models.interfaces.media import MediaItem, MediaKind, Prompt, TokenizedChat, VideoFrames, VideoMetadata
from models.interfaces.resizing import FrameResizer
from models.qwen_vl.config import Qwen2VLConfig, load_config
from models.qwen_vl.items import grid_of, picture_item, vision_item
from models.qwen_vl.pictures import DEFAULT_FPS, official_video_limits, sample_frames, smart_resize
from models.qwen_vl.positions import frame_pair_seconds, mrope_positions, time_positions
from models.text.chat_template import ChatTemplate
from models.text.processor import ChatProcessor, load_text
from models.text.tokenizer import Tokenizer


class Qwen2VLProcessor(ChatProcessor):
    """ChatProcessor of Qwen2-VL and Qwen2.5-VL.

    models/qwen_vl/items.py describes the items. If positions encode time (tokens_per_second), a video also has the
    array time_positions int32 [t]. video_limits: pixels of the frames of videos.
    """

    template_defaults: Mapping[str, bool] = {"add_vision_id": False}
    """With it the template numbers pictures and videos ("Picture 1: ")."""

    def __init__(
        self, config: Qwen2VLConfig, tokenizer: Tokenizer, template: ChatTemplate, generation: Mapping[str, Any]
    ) -> None:
        placeholders: dict[MediaKind, int] = {"image": config.image_token_id, "video": config.video_token_id}
        super().__init__(config.text, tokenizer, template, generation, placeholders)
        self.config = config
        self.video_limits = official_video_limits(config.images.max_pixels, self.context_length, config.vision.factor)
        self._settings = repr((config.vision, config.images)).encode()

    def image(self, picture: Image.Image, *, detail: str = "auto", source: bytes | None = None) -> MediaItem:
        config = self.config
        return picture_item(picture, config.images, config.vision, self._settings, detail=detail, source=source)

    def sample_video(self, metadata: VideoMetadata, *, fps: float | None, max_frames: int) -> list[int]:
        """Chooses frames as qwen-vl-utils does (models/qwen_vl/pictures.py), but no more than the context can hold."""
        return sample_frames(metadata, fps=fps, max_frames=min(max_frames, self.video_limits.most_frames))

    def frame_resizer(self, metadata: VideoMetadata, num_frames: int) -> FrameResizer:
        limits, factor = self.video_limits, self.config.vision.factor
        bounds = {"min_pixels": limits.min_frame_pixels, "max_pixels": limits.frame_pixels(num_frames)}
        size = smart_resize(metadata.height, metadata.width, factor=factor, **bounds, field="video_url")
        return FrameResizer(*size, may_leave=True)

    def video(self, video: VideoFrames) -> MediaItem:
        frames, to = video.resized(self.frame_resizer)
        item = vision_item("video", frames, (to.height, to.width), self.config.vision, self._settings)
        if self.config.tokens_per_second is None:
            return item
        # Not part of the digest: embeddings do not depend on the rate, and the prefix cache compares positions.
        seconds = self._pair_seconds(video, item.num_sequences)
        times = time_positions(seconds, self.config.tokens_per_second)
        return replace(item, arrays={**item.arrays, "time_positions": times})

    def expand_placeholders(self, chat: TokenizedChat, items: Sequence[MediaItem]) -> Prompt:
        """With M-RoPE positions."""
        prompt = super().expand_placeholders(chat, items)
        runs = [(run.start, grid_of(items[run.item])) for run in prompt.placeholders]
        positions, next_position = mrope_positions(
            len(prompt.token_ids),
            runs,
            merge_size=self.config.vision.merge_size,
            times=[items[run.item].arrays.get("time_positions") for run in prompt.placeholders],
        )
        if next_position >= self.context_length:
            raise PromptTooLong(
                "messages",
                f"the videos are too long: their time reaches position {next_position} of a context of "
                f"{self.context_length}",
            )
        return replace(prompt, positions=positions, next_position=next_position)

    def _pair_seconds(self, video: VideoFrames, num_pairs: int) -> np.ndarray:
        """Start of each frame pair in seconds after the first one, [num_pairs]: evenly spaced at the average rate of
        the sampled frames, as in the reference."""
        pair = self.config.vision.temporal_patch_size
        rate = video.metadata.fps if video.metadata.fps > 0 else DEFAULT_FPS
        sampled_fps = len(video.frames) / max(video.metadata.num_frames, 1) * rate
        return frame_pair_seconds(num_pairs, pair / sampled_fps)


def load_processor(directory: Path) -> Qwen2VLProcessor:
    """Reads config.json, preprocessor_config.json, generation_config.json, tokenizer.json and the chat template."""
    return Qwen2VLProcessor(load_config(directory), *load_text(directory))
