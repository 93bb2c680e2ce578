"""Pictures, videos and prompts of Qwen2-VL. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from models.interfaces.errors import CheckpointError, InputError, PromptTooLong
from models.interfaces.media import MediaItem, Prompt, TokenizedChat, VideoFrames, VideoMetadata
from models.interfaces.resizing import FrameResizer, resized_or_left
from models.qwen_vl.config import Qwen2VLConfig, load_config
from models.qwen_vl.items import grid_of, picture_size, vision_item
from models.qwen_vl.pictures import DEFAULT_FPS, VideoLimits, official_video_limits, sample_frames, smart_resize
from models.qwen_vl.positions import frame_pair_seconds, mrope_positions, time_positions
from models.text.chat_template import ChatTemplate
from models.text.placeholders import check_length, expand, repeated
from models.text.processor import TextProcessor, load_text
from models.text.tokenizer import Tokenizer

_STOP_TOKENS = ("<|im_end|>", "<|endoftext|>")


class Qwen2VLProcessor(TextProcessor):
    """Implements models.interfaces.processor.ChatProcessor for Qwen2-VL and Qwen2.5-VL.

    models/qwen_vl/items.py describes the items. If positions encode time (tokens_per_second), a video also has the
    array time_positions int32 [t].
    """

    def __init__(
        self,
        config: Qwen2VLConfig,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        generation: Mapping[str, Any],
        video_limits: VideoLimits,
        *,
        tokens_per_second: float | None = None,
    ) -> None:
        """tokens_per_second: positions on the time axis per second of video; None: one for each frame pair."""
        super().__init__(config.text, tokenizer, template, generation, _STOP_TOKENS)
        self.config = config
        self.video_limits = video_limits
        self.tokens_per_second = tokens_per_second
        self._settings = repr((config.vision, config.images, video_limits)).encode()
        self._placeholders = {"image": config.image_token_id, "video": config.video_token_id}
        self.placeholder_ids = frozenset(self._placeholders.values())
        if unknown := set(self.placeholder_ids - set(tokenizer.special_ids.values())):
            raise CheckpointError(f"config.json: image_token_id or video_token_id {unknown} not in tokenizer.json")

    def image(self, picture: Image.Image, *, detail: str = "auto", source: bytes | None = None) -> MediaItem:
        """picture: upright, alpha already flattened."""
        vision = self.config.vision
        height, width = picture_size(picture, self.config.images, vision.factor, detail)
        frame = resized_or_left(picture, width, height)
        return vision_item("image", (frame,), (height, width), vision, self._settings, source=source)

    def sample_video(self, metadata: VideoMetadata, *, fps: float | None, max_frames: int) -> list[int]:
        """Chooses frames as qwen-vl-utils does (models/qwen_vl/pictures.py), but no more than the context can hold."""
        return sample_frames(metadata, fps=fps, max_frames=min(max_frames, self.video_limits.most_frames))

    def frame_resizer(self, metadata: VideoMetadata, num_frames: int) -> FrameResizer:
        height, width, limits = metadata.height, metadata.width, self.video_limits
        bounds = {"min_pixels": limits.min_frame_pixels, "max_pixels": limits.frame_pixels(num_frames)}
        try:
            size = smart_resize(height, width, factor=self.config.vision.factor, **bounds)
        except ValueError as error:
            raise InputError("video_url", str(error)) from error
        return FrameResizer(*size, may_leave=True)

    def video(self, video: VideoFrames) -> MediaItem:
        frames, to = video.resized(self.frame_resizer)
        item = vision_item("video", frames, (to.height, to.width), self.config.vision, self._settings)
        if self.tokens_per_second is None:
            return item
        # Not part of the digest: embeddings do not depend on the rate, and the prefix cache compares positions.
        seconds = self._pair_seconds(video, item.num_sequences)
        times = time_positions(seconds, self.tokens_per_second)
        return replace(item, arrays={**item.arrays, "time_positions": times})

    def template_arguments(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """options: with add_vision_id the chat template numbers the pictures and videos ("Picture 1: ")."""
        return {"add_vision_id": bool(options.get("add_vision_id", False)), **super().template_arguments(options)}

    def expand_placeholders(self, chat: TokenizedChat, items: Sequence[MediaItem]) -> Prompt:
        """Repeats each placeholder for the embedding rows of its item, and computes M-RoPE positions."""
        ordered = [items[item] for _, item in chat.placeholders]
        media = [repeated(self._placeholders[item.kind], item.num_embeds) for item in ordered]
        token_ids, placeholders = expand(chat, media)
        check_length(token_ids, self.context_length)
        runs = [(run.start, grid_of(items[run.item])) for run in placeholders]
        positions, next_position = mrope_positions(
            len(token_ids),
            runs,
            merge_size=self.config.vision.merge_size,
            times=[items[run.item].arrays.get("time_positions") for run in placeholders],
        )
        if next_position >= self.context_length:
            raise PromptTooLong(
                "messages",
                f"the videos are too long: their time reaches position {next_position} of a context of "
                f"{self.context_length}",
            )
        return Prompt(token_ids, positions, next_position, tuple(items), placeholders)

    def _pair_seconds(self, video: VideoFrames, num_pairs: int) -> np.ndarray:
        """Start of each frame pair in seconds after the first one, [num_pairs]: evenly spaced at the average rate of
        the sampled frames, as in the reference."""
        pair = self.config.vision.temporal_patch_size
        rate = video.metadata.fps if video.metadata.fps > 0 else DEFAULT_FPS
        sampled_fps = len(video.frames) / max(video.metadata.num_frames, 1) * rate
        return frame_pair_seconds(num_pairs, pair / sampled_fps)


def load_processor(directory: Path, *, video_limits: VideoLimits | None = None) -> Qwen2VLProcessor:
    """Reads config.json, preprocessor_config.json, generation_config.json, tokenizer.json and the chat template.

    video_limits: pixels of video frames; None for the rule of qwen-vl-utils within the checkpoint's limits.
    """
    return processor_of(directory, load_config(directory), video_limits)


def processor_of(
    directory: Path,
    config: Qwen2VLConfig,
    video_limits: VideoLimits | None = None,
    *,
    tokens_per_second: float | None = None,
) -> Qwen2VLProcessor:
    """load_processor for a configuration that was read already."""
    if video_limits is None:
        context_length = int(config.text["max_position_embeddings"])
        video_limits = official_video_limits(config.images.max_pixels, context_length, config.vision.factor)
    return Qwen2VLProcessor(config, *load_text(directory), video_limits, tokens_per_second=tokens_per_second)
