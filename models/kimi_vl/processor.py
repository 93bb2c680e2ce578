"""Prompts, pictures and videos of Kimi-VL: ids assembled by number. Torch-free.

A video is sent as its frames, each an image block of its own, as the model card describes; nothing marks time.
docs/models/kimi_vl.md has the rules in words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from models.checkpoints.published import read_optional_json
from models.interfaces.errors import CheckpointError
from models.interfaces.media import ContentPart, MediaItem, MediaKind, VideoFrames, VideoMetadata, media_digest
from models.interfaces.resizing import FrameResizer, resized_or_left
from models.kimi_vl.config import KimiVLConfig, load_config
from models.kimi_vl.pictures import ImageSettings, checked_size, fitted_size, load_image_settings
from models.kimi_vl.tokenizer import load_tokenizer
from models.text.chat_template import ChatTemplate, load_chat_template
from models.text.placeholders import MediaTokens, join, plain, repeated
from models.text.processor import ChatProcessor
from models.text.tokenizer import Tokenizer
from models.text.tools import Escape

_ROLE_TOKENS = ("<|im_system|>", "<|im_user|>", "<|im_assistant|>")
_STOP_TOKENS = ("[EOS]", "<|im_end|>", "[EOT]")
_LOW_DETAIL_DIVISOR = 4
_DEFAULT_VIDEO_FPS = 1.0
_VIDEO_SHARE = 0.9
"""Share of the context for the frames of one video."""


class KimiVLProcessor(ChatProcessor):
    """ChatProcessor of Kimi-VL."""

    reasoning_markers = ("◁think▷", "◁/think▷")
    refused_options: Mapping[str, str] = {
        "enable_thinking": "Kimi-VL has no switch: Thinking checkpoints always reason",
        "add_vision_id": "Kimi-VL does not number pictures",
    }

    def __init__(
        self,
        config: KimiVLConfig,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        images: ImageSettings,
        generation: Mapping[str, Any],
    ) -> None:
        # Reserved ids between named ones can be generated, as by the published code; they have no text.
        placeholders: dict[MediaKind, int] = dict.fromkeys(("image", "video"), config.media_placeholder_token_id)
        super().__init__(asdict(config.text), tokenizer, template, generation, placeholders, _STOP_TOKENS)
        self.config = config
        self.images = images
        self._frame_limit = self.images.in_token_limit // _LOW_DETAIL_DIVISOR
        special = tokenizer.special_ids
        opening = [special["<|media_start|>"], *tokenizer.encode_plain("image"), special["<|media_content|>"]]
        # The template opens the block of a video's first frame and closes that of the last.
        self._between_frames = plain([special["<|media_end|>"], *opening])
        self._frame_markers = len(opening) + 1

    def image(self, picture: Image.Image, *, detail: str = "auto", source: bytes | None = None) -> MediaItem:
        """detail "low" allows a quarter of the patches."""
        limit = self._frame_limit if detail == "low" else self.images.in_token_limit
        width, height = checked_size(picture.size, self.images.patch_size, limit, "image_url")
        frame = resized_or_left(picture, width, height)
        return self._item("image", [frame], (height, width), None if source is None else source + b"%d" % limit)

    def sample_video(self, metadata: VideoMetadata, *, fps: float | None, max_frames: int) -> list[int]:
        """The middles of equal stretches, one for each 1 / fps seconds (default: one per second), at most max_frames,
        and no more than leave a tenth of the context free."""
        wanted = round(metadata.duration * (fps or _DEFAULT_VIDEO_FPS))
        patch = self.images.patch_size
        _, (height, width) = fitted_size((metadata.width, metadata.height), patch, self._frame_limit)
        positions = (height // patch) * (width // patch) // self.config.vision.merged_patches + self._frame_markers
        fitting = int(_VIDEO_SHARE * self.context_length) // positions
        count = max(1, min(wanted, max_frames, fitting, metadata.num_frames))
        return [int((index + 0.5) * metadata.num_frames / count) for index in range(count)]

    def frame_resizer(self, metadata: VideoMetadata, num_frames: int) -> FrameResizer:
        """Every frame is resized like an image with low detail."""
        size = metadata.width, metadata.height
        width, height = checked_size(size, self.images.patch_size, self._frame_limit, "video_url")
        return FrameResizer(height, width)

    def video(self, video: VideoFrames) -> MediaItem:
        frames, to = video.resized(self.frame_resizer)
        return self._item("video", frames, (to.height, to.width))

    def template_content(self, parts: Sequence[ContentPart], kinds: Sequence[MediaKind], escaped: Escape) -> Any:
        """A video is one image for the template; media_tokens makes frames of it."""
        return super().template_content(parts, ["image"] * len(kinds), escaped)

    def media_tokens(self, item: MediaItem) -> MediaTokens:
        """The rows of each frame, in a block of its own."""
        rows = (item.arrays["grids"].prod(axis=1) // self.config.vision.merged_patches).tolist()
        runs = {count: repeated(self.placeholders[item.kind], count) for count in set(rows)}
        parts = [runs[rows[0]]]
        for count in rows[1:]:
            parts += (self._between_frames, runs[count])
        return join(parts)

    def _item(
        self, kind: MediaKind, frames: Sequence[np.ndarray], size: tuple[int, int], source: bytes | None = None
    ) -> MediaItem:
        """size: height and width of the resized frames, which the encoder pads with black, right and bottom, to blocks
        of 2 x 2 patches."""
        sizes = np.array([size] * len(frames), dtype=np.int32)
        grids = -(-sizes // (2 * self.images.patch_size)) * 2
        arrays = {"grids": grids, "sizes": sizes}
        patches = int(grids.prod(axis=1).sum())
        return MediaItem(
            kind=kind,
            frames=tuple(frames),
            arrays=arrays,
            num_patches=patches,
            num_sequences=len(frames),
            num_embeds=patches // self.config.vision.merged_patches,
            digest=media_digest(kind, frames, arrays, repr(self.images).encode(), source),
        )


def load_processor(directory: Path) -> KimiVLProcessor:
    """Reads config.json, preprocessor_config.json, generation_config.json, tiktoken.model, tokenizer_config.json and
    the chat template. Raises CheckpointError that names the file and what is wrong with it."""
    config, tokenizer = load_config(directory), load_tokenizer(directory)
    needed = {*_ROLE_TOKENS, "<|im_middle|>", "<|im_end|>"}
    needed |= {"<|media_start|>", "<|media_content|>", "<|media_end|>"}
    if missing := sorted(needed - tokenizer.special_ids.keys()):
        raise CheckpointError(f"{directory}: tokenizer_config.json lacks special tokens {missing}")
    generation = read_optional_json(directory, "generation_config.json")
    images = load_image_settings(directory, config.vision)
    return KimiVLProcessor(config, tokenizer, load_chat_template(directory), images, generation)
