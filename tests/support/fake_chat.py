"""A chat model without weights: tokens are the bytes of the last user message, a picture is four positions."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from models.interfaces.errors import InputError
from models.interfaces.media import (
    CallFormat,
    ChatMessage,
    MediaItem,
    MediaKind,
    PlaceholderRange,
    Prompt,
    TokenizedChat,
    Tool,
    VideoFrames,
    VideoMetadata,
)
from models.interfaces.resizing import FrameResizer
from service.hub import Checkpoint
from service.hub.catalog import Catalog, HostedModel

END = 256
IMAGE = 257


class FakeProcessor:
    stop_token_ids = frozenset({END})
    generation_defaults: Mapping[str, float | int] = {"top_p": 0.5}
    context_length = 4096
    vocab_size = 258
    reasoning_markers = ("<think>", "</think>")
    call_format: CallFormat = "json"
    template_options = frozenset[str]()
    modes: Mapping[str, Any] = {}
    audio: Any = None

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode())

    def tokenize_prompt(self, text: str) -> list[int]:
        return self.tokenize(text)

    def detokenize(self, token_ids: Sequence[int]) -> bytes:
        return bytes(token for token in token_ids if token < 256)

    def image(self, picture: Image.Image, *, detail: str = "auto", source: bytes | None = None) -> MediaItem:
        if picture.width < 4:
            raise InputError("image_url", f"the image is {picture.width} x {picture.height}; too narrow")
        return self._item("image", (np.asarray(picture),))

    def sample_video(self, metadata: VideoMetadata, *, fps: float | None, max_frames: int) -> list[int]:
        return list(range(min(metadata.num_frames, max_frames)))

    def frame_resizer(self, metadata: VideoMetadata, num_frames: int) -> FrameResizer:
        return FrameResizer(metadata.height, metadata.width)

    def video(self, video: VideoFrames) -> MediaItem:
        return self._item("video", video.frames)

    def _item(self, kind: Any, frames: tuple[np.ndarray, ...]) -> MediaItem:
        digest = hashlib.sha256(b"".join(frame.tobytes() for frame in frames)).digest()
        return MediaItem(kind, frames, {"grid": np.ones(3, np.int32)}, 4, 1, 4, digest)

    def apply_chat_template(
        self,
        messages: Sequence[ChatMessage],
        kinds: Sequence[MediaKind],
        *,
        options: Mapping[str, Any],
        tools: Sequence[Tool] = (),
    ) -> TokenizedChat:
        if options.get("add_vision_id"):
            raise InputError("add_vision_id", "nothing is numbered")
        if options.get("enable_thinking"):
            text = b"<think>hm</think>\n\n"
        else:
            text = b""
        text += "".join(part.text or "" for part in messages[-1].content).encode()
        ids = np.array(list(text) + [IMAGE] * len(kinds), np.int32)
        return TokenizedChat(ids, tuple((len(text) + index, index) for index in range(len(kinds))))

    def expand_placeholders(self, chat: TokenizedChat, items: Sequence[MediaItem]) -> Prompt:
        text = len(chat.token_ids) - len(items)
        ids = np.append(chat.token_ids, [IMAGE] * (3 * len(items))).astype(np.int32)
        placeholders = tuple(PlaceholderRange(index, text + 4 * index, 4) for index in range(len(items)))
        return Prompt(ids, np.arange(len(ids), dtype=np.int32)[None], len(ids), tuple(items), placeholders)


def fake_catalog() -> Catalog:
    checkpoint = Checkpoint("tiny", Path("/nowhere"))
    return Catalog([HostedModel(("tiny", "tiny-alias"), "chat", checkpoint, FakeProcessor, 1, demo=True)])
