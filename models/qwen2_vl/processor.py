"""Pictures, videos and prompts of Qwen2-VL. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from models.chat_template import ChatTemplate, load_chat_template, template_role, unused_character
from models.errors import CheckpointError, InputError
from models.media import (
    ChatMessage,
    MediaItem,
    MediaKind,
    Prompt,
    TokenizedChat,
    VideoFrames,
    VideoMetadata,
    media_digest,
)
from models.placeholders import check_length, expand, repeated, tokenized_chat
from models.published import read_optional_json, sampling_defaults
from models.qwen2_vl.config import Qwen2VLConfig, load_config
from models.qwen2_vl.pictures import VideoLimits, official_video_limits, sample_frames, smart_resize
from models.qwen2_vl.positions import mrope_positions
from models.resizing import each, resize
from models.tokenizer import Tokenizer, load_tokenizer

_STOP_TOKENS = ("<|im_end|>", "<|endoftext|>")
_LOW_DETAIL_PIXELS = 512 * 512


class Qwen2VLProcessor:
    """ChatProcessor of Qwen2-VL.

    An item's frames are the picture, or the frames of the video; the encoder takes them in pairs and repeats the last
    one of an odd number. Its array grid_thw int32 [3] counts frame pairs and rows and columns of patches.
    """

    reasoning_markers = None

    def __init__(
        self,
        config: Qwen2VLConfig,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        generation: Mapping[str, Any],
        video_limits: VideoLimits,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.template = template
        self.video_limits = video_limits
        # The embedding has more rows than there are tokens; the others are padding and never generated.
        self.vocab_size = tokenizer.vocab_size
        self.context_length = int(config.text["max_position_embeddings"])
        self.stop_token_ids = _stop_token_ids(config, tokenizer, generation)
        self.generation_defaults = sampling_defaults(generation)
        self.max_item_embeds = self.context_length
        self._settings = repr((config.vision, config.images, video_limits)).encode()
        self._placeholders = {"image": config.image_token_id, "video": config.video_token_id}
        rows = int(config.text["vocab_size"])
        if tokenizer.vocab_size > rows:
            raise CheckpointError(f"tokenizer.json has {tokenizer.vocab_size} ids, config.json says vocab_size {rows}")
        unknown = set(self._placeholders.values()) - set(tokenizer.special_ids.values())
        if unknown:
            raise CheckpointError(f"config.json: image_token_id or video_token_id {unknown} not in tokenizer.json")

    def tokenize(self, text: str) -> list[int]:
        return self.tokenizer.encode_plain(text)

    def detokenize(self, token_ids: Sequence[int]) -> bytes:
        return self.tokenizer.decode(token_ids)

    def image(self, picture: Image.Image, *, detail: str = "auto", source: bytes | None = None) -> MediaItem:
        """picture: upright, alpha already flattened. detail "low" bounds it to 512 x 512 pixels, otherwise the
        checkpoint's limits hold."""
        images = self.config.images
        limit = min(images.max_pixels, _LOW_DETAIL_PIXELS) if detail == "low" else images.max_pixels
        return self._item("image", (picture,), min(images.min_pixels, limit), limit, source)

    def sample_video(self, metadata: VideoMetadata, *, fps: float | None, max_frames: int) -> list[int]:
        """The rule of qwen-vl-utils (models/qwen2_vl/pictures.py), never more frames than the context can hold."""
        return sample_frames(metadata, fps=fps, max_frames=min(max_frames, self.video_limits.most_frames))

    def video(self, video: VideoFrames) -> MediaItem:
        if not video.frames:
            raise InputError("video_url", "the video has no frames")
        sizes = {frame.shape[:2] for frame in video.frames}
        if len(sizes) > 1:
            raise InputError("video_url", f"the frames of the video differ in size: {sorted(sizes)}")
        frames = [Image.fromarray(frame) for frame in video.frames]
        limits = self.video_limits
        return self._item("video", frames, limits.min_frame_pixels, limits.frame_pixels(len(frames)))

    def apply_chat_template(
        self, messages: Sequence[ChatMessage], kinds: Sequence[MediaKind], *, options: Mapping[str, Any]
    ) -> TokenizedChat:
        """options: add_vision_id numbers the pictures and videos ("Picture 1: "), as the chat template does it."""
        if options.get("enable_thinking"):
            raise InputError("enable_thinking", "Qwen2-VL has no reasoning mode")
        texts = [part.text for message in messages for part in message.content if part.text is not None]
        shield = unused_character(texts)
        rendered = self.template.render(
            [self._turn(message, kinds, shield) for message in messages],
            add_vision_id=bool(options.get("add_vision_id", False)),
        )
        return tokenized_chat(self.tokenizer.encode(rendered, shield), messages, set(self._placeholders.values()))

    def expand_placeholders(self, chat: TokenizedChat, items: Sequence[MediaItem]) -> Prompt:
        """A placeholder is repeated for the rows of its item."""
        ordered = [items[item] for _, item in chat.placeholders]
        media = [repeated(self._placeholders[item.kind], item.num_embeds) for item in ordered]
        token_ids, spans = expand(chat, media)
        check_length(token_ids, self.context_length)
        runs = [(span.start, _grid(items[span.item])) for span in spans]
        positions, next_position = mrope_positions(len(token_ids), runs, merge_size=self.config.vision.merge_size)
        return Prompt(token_ids, positions, next_position, tuple(items), spans)

    def _item(
        self,
        kind: MediaKind,
        pictures: Sequence[Image.Image],
        min_pixels: int,
        max_pixels: int,
        source: bytes | None = None,
    ) -> MediaItem:
        vision = self.config.vision
        width, height = pictures[0].size
        try:
            height, width = smart_resize(
                height, width, factor=vision.factor, min_pixels=min_pixels, max_pixels=max_pixels
            )
        except ValueError as error:
            raise InputError(f"{kind}_url", str(error)) from error
        frames = tuple(each(lambda picture: resize(picture, width, height), pictures))
        pairs = -(-len(frames) // vision.temporal_patch_size)
        grid = np.array([pairs, height // vision.patch_size, width // vision.patch_size], dtype=np.int32)
        patches = int(grid.prod())
        arrays = {"grid_thw": grid}
        return MediaItem(
            kind=kind,
            frames=frames,
            arrays=arrays,
            num_patches=patches,
            num_sequences=pairs,
            num_embeds=patches // vision.merged_patches,
            digest=media_digest(kind, frames, arrays, self._settings, source),
        )

    def _turn(self, message: ChatMessage, kinds: Sequence[MediaKind], shield: str) -> dict[str, Any]:
        role = template_role(message.role)
        content: list[dict[str, str]] = []
        for part in message.content:
            if part.item is not None:
                content.append({"type": kinds[part.item]})
            elif part.text is not None:
                # Shields at both ends too: two texts must not make a special token where they meet.
                content.append({"type": "text", "text": shield + self.tokenizer.shield(part.text, shield) + shield})
        if all(part["type"] == "text" for part in content):
            return {"role": role, "content": "".join(part["text"] for part in content)}
        return {"role": role, "content": content}


def load_processor(directory: Path, *, video_limits: VideoLimits | None = None) -> Qwen2VLProcessor:
    """Reads config.json, preprocessor_config.json, generation_config.json, tokenizer.json and the chat template.

    video_limits: pixels of video frames; None for the rule of qwen-vl-utils within the checkpoint's limits.
    """
    config = load_config(directory)
    if video_limits is None:
        context_length = int(config.text["max_position_embeddings"])
        video_limits = official_video_limits(config.images.max_pixels, context_length, config.vision.factor)
    return Qwen2VLProcessor(
        config,
        load_tokenizer(directory),
        load_chat_template(directory),
        read_optional_json(directory, "generation_config.json"),
        video_limits,
    )


def _grid(item: MediaItem) -> tuple[int, int, int]:
    t, h, w = (int(size) for size in item.arrays["grid_thw"])
    return t, h, w


def _stop_token_ids(config: Qwen2VLConfig, tokenizer: Tokenizer, generation: Mapping[str, Any]) -> frozenset[int]:
    eos = generation.get("eos_token_id", config.text.get("eos_token_id", []))
    named = [tokenizer.special_ids[name] for name in _STOP_TOKENS if name in tokenizer.special_ids]
    return frozenset([*(eos if isinstance(eos, list) else [eos]), *named])
